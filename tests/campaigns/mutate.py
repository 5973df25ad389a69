"""Mutations of a memory's folder: damage, and the lies of somebody who can recompute checksums.

A mutation changes one thing in a folder; `reseal` then does what a forger would: it makes sizes,
checksums and the digest true again. Knows files, JSON and safetensors; nothing of what is checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG: Final = "memory_config.json"
OUTSIDE: Final = "file name"  # the kind of change after which a file is not in its folder
_HOSTILE_TEXTS: Final = (
    "", "\0", "../x", "/etc/passwd", "a/b", "\ud800", "[red]x[/]", "\x1b[2J", "x" * 10_000,
    "exact", "fast", "ivfpq", "cosine", "float16", "nn", "..", "nan", "layer-000.safetensors",
)  # fmt: skip
_HOSTILE_NUMBERS: Final = (
    0, 1, -1, 2, 3, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30, 10**400, 0.0, -0.0, 0.5, -1.5,
    1e-45, 1e-300, 1e30, 1e38, 1e300, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
_DTYPES: Final = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_DEPTH: Final = 100_000  # of a JSON that is nested too deeply to be parsed by recursion


def mutate(folder: Path, draw: random.Random) -> str:
    """Change one thing in `folder` and return the kind of change."""
    kind, change = draw.choices(
        [
            ("bytes of a file", _change_bytes),
            ("value in the config", _change_value),
            ("shape of the config", _change_structure),
            ("text of the config", _change_text),
            ("another use", _change_routing),
            ("tensor", _change_tensor),
            ("numbers of a tensor", _change_numbers),
            ("header of a tensor file", _change_header),
            (OUTSIDE, _change_place),
        ],
        weights=[4, 8, 4, 1, 2, 6, 10, 3, 2],
    )[0]
    change(folder, draw)
    return kind


def reseal(folder: Path) -> None:
    """Make sizes, checksums and the digest true, wherever the config can still be read."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf8"))
    except (ValueError, RecursionError, OSError):
        return
    if not isinstance(config, dict):
        return
    layers = config.get("layers")
    for entry in (
        config.get("tokens"), config.get("head_keys"), *(layers if isinstance(layers, list) else ())
    ):  # fmt: skip
        if not isinstance(entry, dict) or not isinstance(entry.get("file"), str):
            continue
        try:
            named = folder / entry["file"]
            if not named.is_file():  # reading a pipe would wait for ever
                continue
            data = named.read_bytes()
        except (OSError, ValueError):
            continue
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    kept = {name: value for name, value in config.items() if name != "digest"}
    config["digest"] = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(config, indent=2), encoding="utf8")


def _tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _change_bytes(folder: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data))
    action = draw.randrange(6)
    if action == 0:
        data[place] ^= 1 << draw.randrange(8)
    elif action == 1:
        for _ in range(16):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif action == 2:
        del data[place:]
    elif action == 3:
        data += draw.randbytes(draw.choice([1, 8, 4096]))
    elif action == 4:
        data[place:place] = draw.randbytes(draw.choice([1, 8]))
    else:
        stop = place + draw.choice([1, 8, 64])
        data[place:stop] = bytes(len(data[place:stop]))
    path.write_bytes(bytes(data))


def _change_value(folder: Path, draw: random.Random) -> None:
    config = _read(folder)
    holder, key = draw.choice(_places(config))
    holder[key] = _hostile(draw, holder[key])
    _write(folder, config)


def _change_structure(folder: Path, draw: random.Random) -> None:
    config = _read(folder)
    holder, key = draw.choice(_places(config))
    action = draw.randrange(4)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, dict):
        holder[draw.choice(["index", "gamma", "keys", "head_keys", "drawn", "gate", "x"])] = (
            _hostile(draw, None)
        )
    elif action == 2:
        lists = [here[name] for here, name in _places(config) if isinstance(here[name], list)]
        grown = draw.choice(lists)
        grown += [draw.choice(grown) if grown else _hostile(draw, None)] * draw.choice([1, 1000])
    else:
        other, name = draw.choice(_places(config))
        holder[key] = json.loads(json.dumps(other[name]))
    _write(folder, config)


def _change_text(folder: Path, draw: random.Random) -> None:
    path = folder / CONFIG
    text = path.read_text(encoding="utf8")
    deep = "[" * _DEPTH + "]" * _DEPTH
    path.write_bytes(
        draw.choice(
            [
                deep.encode(),
                text.replace("{", '{"deep": ' + deep + ",", 1).encode(),
                text.replace("{", '{"deep": ' + "[" * 900 + "]" * 900 + ",", 1).encode(),
                text.replace("{", '{"long": ' + "9" * 5000 + ",", 1).encode(),
                text.replace("{", '{"nan": NaN,', 1).encode(),
                b"null", b"[]", b'"x"', b"", b"\0" * 100, text.encode("utf-16"), b"\xff" + b"{}",
                json.dumps(json.loads(text)).encode(),
            ]
        )
    )  # fmt: skip


def _change_routing(folder: Path, draw: random.Random) -> None:
    """Ask for a use that is valid by itself, but that the memory may not serve."""
    config = _read(folder)
    config["routing"] |= {
        "k": draw.choice([1, 4, 10**6, 2**62]),
        "similarity": draw.choice(["rbf", "rbf-unit", "cosine"]),
        "index": draw.choice(
            [
                None,
                {
                    "kind": draw.choice(["exact", "fast", "ivfpq", "faiss-flat"]),
                    "dims": draw.choice([None, 64, 100, 4096, 2**40]),
                    "probes": draw.choice([1, 10**6, 2**62]),
                    "bits": draw.choice([4, 8]),
                    "rerank": draw.random() < 0.5,
                },
            ]
        ),
        "head": draw.choice(
            [None, {"k": draw.choice([1, 2**62]), "keys": "hidden", "weight": 0.9}]
        ),
        "layers": draw.choice([None, [0], [1, 0], [5], [-1]]),
    }
    _write(folder, config)


def _change_tensor(folder: Path, draw: random.Random) -> None:
    """Give a tensor another dtype, shape or name, or take it away."""
    path = draw.choice(_tensor_files(folder))
    tensors = load_file(path)
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    action = draw.randrange(8)
    if action == 0:
        tensors[name] = tensor.to(draw.choice(_DTYPES))
    elif action == 1:
        tensors[name] = tensor.flatten()
    elif action == 2:
        tensors[name] = tensor[None]
    elif action == 3 and tensor.ndim:
        tensors[name] = tensor[: draw.randrange(len(tensor) + 1)]
    elif action == 4 and tensor.ndim:
        tensors[name] = torch.cat([tensor, tensor[: draw.randint(1, 3)]])
    elif action == 5:
        width = draw.randrange(4)
        tensors[name] = torch.zeros([len(tensor) if tensor.ndim else 1, width], dtype=tensor.dtype)
    elif action == 6:
        del tensors[name]
    else:
        tensors[draw.choice(["keys", "index.keys", "values.values", "x"])] = tensor.clone()
    _save(path, tensors)


def _change_numbers(folder: Path, draw: random.Random) -> None:
    """Put hostile numbers into a tensor, at one place or everywhere."""
    path = draw.choice(_tensor_files(folder))
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    name = draw.choice(sorted(tensors))
    flat = tensors[name].reshape(-1)
    if not len(flat):
        return
    place = slice(None) if draw.random() < 0.3 else draw.randrange(len(flat))
    if flat.is_floating_point():
        largest = torch.finfo(flat.dtype).max
        numbers = [float("nan"), float("inf"), float("-inf"), largest, -largest, 0.0, -1.0, 1e-30]
        flat[place] = draw.choice(numbers)
    else:
        limits = torch.iinfo(flat.dtype)
        numbers = [limits.max, limits.min, 0, len(flat), -1, 127, draw.randrange(limits.max)]
        flat[place] = min(max(draw.choice(numbers), limits.min), limits.max)
    _save(path, tensors)


def _change_header(folder: Path, draw: random.Random) -> None:
    """Lie in the header of a tensor file, or about its length."""
    path = draw.choice(_tensor_files(folder))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    entry = header[draw.choice([name for name in header if name != "__metadata__"])]
    action = draw.randrange(7)
    if action == 0:
        entry["data_offsets"] = draw.choice([[0, 8], [0, 2**62], [8, 0], [-8, 0], [0, 0], []])
    elif action == 1:
        entry["shape"] = draw.choice([[2**62, 0], [2**40], [-1], [2**32, 2**32], [], [1.5], "x"])
    elif action == 2:
        entry["dtype"] = draw.choice(["F8_E4M3", "F4", "BOOL", "U64", "U16", "C64", "X", "I16"])
    elif action == 3:
        header["__metadata__"] = draw.choice([{"a": "b" * 1000}, {"a": 1}, [], None])
    elif action == 4:
        header = draw.choice([{}, {"keys": {}}, [], None])
    elif action == 5:
        size = draw.choice([0, 1, 2**32, 2**63, 2**64 - 1, 100_000_001])
        path.write_bytes(size.to_bytes(8, "little") + data[8:])
        return
    else:
        entry["shape"], other = list(entry["shape"])[::-1], entry["shape"]
        entry["shape"] = entry["shape"] if entry["shape"] != other else [1, *other]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)


def _change_place(folder: Path, draw: random.Random) -> None:
    """Let the config name a file elsewhere, or put something else in a file's place."""
    path = draw.choice(_tensor_files(folder))
    outside = folder.parent / f"outside-{path.name}"
    outside.write_bytes(path.read_bytes())
    action = draw.randrange(5)
    config = _read(folder)
    if action <= 1:
        entries = [config["tokens"], *config["layers"]]
        entry = next((one for one in entries if one["file"] == path.name), entries[0])
        entry["file"] = str(outside) if action else f"../{outside.name}"
    path.unlink()
    if action == 2:
        path.symlink_to(outside)
    elif action == 3:
        path.mkdir()
    elif action == 4:
        os.mkfifo(path)
    _write(folder, config)


def _hostile(draw: random.Random, known: object) -> Any:
    """Return a value that nobody would write here; often of the type of the one that is known."""
    if isinstance(known, bool | None) or draw.random() < 0.5:
        return draw.choice([None, True, False, [], {}, [[]], {"x": 1}, 1, "x", -1.0])
    if isinstance(known, str):
        return draw.choice(_HOSTILE_TEXTS)
    return draw.choice(_HOSTILE_NUMBERS)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return where every value of a JSON lies: its holder and its key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list):
            found += _places(value[key])
    return found


def _read(folder: Path) -> Any:
    return json.loads((folder / CONFIG).read_text(encoding="utf8"))


def _write(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf8")


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
