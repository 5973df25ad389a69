"""JSON that somebody else wrote, read by type: each value is what its field says, or is refused.

Knows JSON, dataclasses and their annotations; nothing of what the fields of a memory mean.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from knn_moe.errors import ConfigError, MemoryFormatError

_MOST_BYTES: Final = 1 << 26  # of a config: a thousand times what a large memory has
_DEEPEST: Final = 32  # levels of lists and objects
_LARGEST: Final = 2**63  # whole numbers stay below: tensors hold no larger ones
_NAMES: Final = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object of finite numbers and plain texts.

    Raises:
        MemoryFormatError: It cannot be read, is no JSON object, is too large or too deep, or holds
            a number or a text that nothing can be done with.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise MemoryFormatError(f"{str(path)!r} is larger than {_MOST_BYTES >> 20} MiB.")
        value = json.loads(data.decode("utf8"))
    except (ValueError, RecursionError):
        raise MemoryFormatError(f"{str(path)!r} is damaged: it is not valid JSON.") from None
    except OSError as error:
        raise MemoryFormatError(f"Cannot read {str(path)!r}: {error.strerror}.") from None
    if not isinstance(value, dict):
        raise MemoryFormatError(f"{str(path)!r} is damaged: it is not a JSON object.")
    _check_values(value, str(path))
    return value


def _check_values(value: object, where: str) -> None:
    """Refuse numbers that are not finite or too large, texts that cannot be shown, and depth."""
    level: list[object] = [value]
    for _ in range(_DEEPEST):
        if not level:
            return
        for each in level:
            _check_plain(each, where)
        level = [part for each in level for part in _parts(each)]
    raise MemoryFormatError(f"{where!r} is damaged: it is nested more than {_DEEPEST} levels deep.")


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def _check_plain(value: object, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise MemoryFormatError(f"{where!r} holds a number that is not finite: {value}.")
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise MemoryFormatError(f"{where!r} holds a whole number of more than 64 bits.")
    if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
        raise MemoryFormatError(f"{where!r} holds a text that is not valid: {value[:40]!a}.")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf8")
    except UnicodeEncodeError:
        return False
    return True


def read_fields(kind: type[T], value: object, where: str, *, others: bool = False) -> T:
    """Make a dataclass of a JSON object.

    Args:
        kind: The dataclass. Its fields may be of type str, bool, int, float, a dataclass, tuple,
            Mapping[str, …], Any, or one of these or None.
        value: The JSON object. Fields that are missing get their default.
        where: What the object is, for messages.
        others: Ignore names that are no fields instead of refusing them.

    Raises:
        MemoryFormatError: A field is missing, unknown, of another type or outside its range.
    """
    found = read_value(Mapping[str, Any], value, where)
    hints = get_type_hints(kind)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    if not others and (unknown := sorted(found.keys() - known.keys())):
        raise MemoryFormatError(f"{where} has an unknown field {unknown[0]!a}.")
    for name, each in known.items():
        if name not in found and each.default is MISSING and each.default_factory is MISSING:
            raise MemoryFormatError(f"{where} lacks {name!r}.")
    given = {
        name: read_value(hints[name], found[name], f"{where}: {name}")
        for name in known
        if name in found
    }
    try:
        return kind(**given)
    except ConfigError as error:
        raise MemoryFormatError(f"{where}: {error}") from None


def read_value(hint: Any, value: Any, where: str) -> Any:
    """Return a JSON value as `hint` says, or raise MemoryFormatError: see `read_fields`."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is types.UnionType:
        if value is None and types.NoneType in parts:
            return None
        return read_value(next(part for part in parts if part is not types.NoneType), value, where)
    if is_dataclass(hint):
        return read_fields(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple:
        return _read_tuple(parts, value, where)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise MemoryFormatError(f"{where} must be an object, got {_show(value)}.")
        return {key: read_value(parts[1], part, f"{where}: {key!a}") for key, part in value.items()}
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise MemoryFormatError(f"{where} must be {_NAMES[hint]}, got {_show(value)}.")
    return value


def _read_tuple(parts: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise MemoryFormatError(f"{where} must be a list, got {_show(value)}.")
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(value)
    if len(parts) != len(value):
        raise MemoryFormatError(f"{where} must have {len(parts)} entries, got {len(value)}.")
    return tuple(read_value(part, each, where) for part, each in zip(parts, value, strict=True))


def _show(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}…"
