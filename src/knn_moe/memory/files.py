"""The memory as a folder: its files, their checks, and how rows are streamed into them.

    memory_config.json        what it is, whose it is, a checksum of every file and of itself
    tokens.safetensors        the reference tokens and each key's place in them
    layer-003.safetensors     keys [M, d], values [M, N]; or what they were compressed to
    head.safetensors          the last hidden states [M, d], or an index of them; only where needed
    README.md                 the model card

Knows bytes, checksums and safetensors headers; nothing of models or routing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.errors import MemoryFormatError
from knn_moe.memory.schema import read_json, read_value
from knn_moe.reference.windows import Span
from knn_moe.support.files import write_whole
from knn_moe.support.folders import put_in_place, require_space, sync_tree
from knn_moe.support.given import MEMORY_CONFIG
from knn_moe.support.hub import hub_or_cache

FORMAT_VERSION: Final = 5  # 3 and 4, which name some fields otherwise, are read as well
CONFIG_FILE: Final = MEMORY_CONFIG
TOKENS_FILE: Final = "tokens.safetensors"
HEAD_FILE: Final = "head.safetensors"
_CHUNK: Final = 1 << 24
_OWN_FILE: Final = re.compile(
    rf"({CONFIG_FILE}|{TOKENS_FILE}|{HEAD_FILE}|README\.md|layer-\d+\.safetensors)(\.new)?"
)
_LONGEST_NAME: Final = 255  # bytes
_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def layer_file(layer: int) -> str:
    """Return the name of a layer's file."""
    return f"layer-{layer:03d}.safetensors"


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written: its dtype and shape, known before its rows are."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        numbers = 1
        for size in self.shape[1:]:
            numbers *= size
        return numbers * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return (self.shape[0] if self.shape else 1) * self.row_bytes


class StreamedFile:
    """A safetensors file of known size whose rows arrive in any order, from any thread."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorPlan], *, fresh: bool) -> None:
        self.path = path
        self.tensors = dict(tensors)
        entries, self._begin, place = {}, {}, 0
        for name, plan in self.tensors.items():
            entries[name] = {
                "dtype": _DTYPES[plan.dtype],
                "shape": list(plan.shape),
                "data_offsets": [place, place + plan.bytes],
            }
            self._begin[name] = place
            place += plan.bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        self._begin = {name: start + len(header) for name, start in self._begin.items()}
        self.size = len(header) + place
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(self._descriptor, 0 if fresh else self.size)
            os.ftruncate(self._descriptor, self.size)
            os.pwrite(self._descriptor, header, 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, rows: Tensor, spans: Iterable[Span]) -> int:
        """Put runs of `rows` in their places, and return the CRC-32 of what was written.

        Each run holds the interpreter's lock for an instant only, so that a GPU stays busy.
        Shapes: rows [n, ...], on the CPU.
        """
        crc = 0
        if not len(rows):
            return crc
        data = memoryview(rows.contiguous().view(torch.uint8).numpy().data).cast("B")
        size = self.tensors[name].row_bytes
        for row, start, count in spans:
            part = data[start * size : (start + count) * size]
            crc = zlib.crc32(part, crc)
            place = self._begin[name] + row * size
            while part:
                written = os.pwrite(self._descriptor, part, place)
                part, place = part[written:], place + written
        return crc

    def crc(self, name: str, spans: Iterable[Span]) -> int:
        """Return the CRC-32 of the runs of a tensor that are in the file."""
        crc, size = 0, self.tensors[name].row_bytes
        for row, _, count in spans:
            place = self._begin[name] + row * size
            for start in range(0, count * size, _CHUNK):
                length = min(_CHUNK, count * size - start)
                crc = zlib.crc32(os.pread(self._descriptor, length, place + start), crc)
        return crc

    def sync(self) -> None:
        """Wait until all that was written is on disk."""
        getattr(os, "fdatasync", os.fsync)(self._descriptor)  # macOS has fsync alone

    def close(self) -> None:
        os.close(self._descriptor)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file chunk by chunk: mapped tensors are not read into memory.

    Wide numbers come first, so that every tensor is aligned; then names in order, so that a copy
    is the same file.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    tensors = {name: tensors[name] for name in order}
    plans = {name: TensorPlan(value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    require_space(path.parent, sum(plan.bytes for plan in plans.values()))
    file = StreamedFile(path, plans, fresh=True)
    try:
        for name, tensor in tensors.items():
            value = tensor if tensor.ndim else tensor.reshape(1)
            step = max(_CHUNK // max(plans[name].row_bytes, 1), 1)
            for start in range(0, len(value), step):
                rows = value[start : start + step].cpu()
                file.write(name, rows, [Span(start, 0, len(rows))])
    finally:
        file.close()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a file: nothing is read before it is used.

    Raises:
        MemoryFormatError: The header is damaged, or names a dtype that no memory has.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            for name in names:
                dtype = file.get_slice(name).get_dtype()
                if dtype not in _DTYPES.values():
                    raise MemoryFormatError(f"{str(path)!r} has {name!a} as {dtype}.")
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, RuntimeError, OSError, ValueError) as error:
        raise MemoryFormatError(f"{str(path)!r} is damaged: {error}.") from None


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """Return what a memory's config says of a file."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": checksum(path)}


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a memory's config with its format and its own digest."""
    sealed = {**config, "format_version": FORMAT_VERSION}
    sealed["digest"] = _digest(sealed)
    text = json.dumps(sealed, indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / CONFIG_FILE, text)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config of a folder.

    Raises:
        MemoryFormatError: There is none, or it is damaged, edited or of a newer format.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise MemoryFormatError(f"{str(folder)!r} is not a memory: it has no {CONFIG_FILE}.")
    _check_inside(folder, path)
    config = read_json(path)
    version = read_value(int, config.get("format_version"), f"{str(path)!r}: format_version")
    if version > FORMAT_VERSION:
        raise MemoryFormatError(
            f"{str(path)!r} has format {version}, and this knn-moe reads up to "
            f"{FORMAT_VERSION}. Upgrade knn-moe to use it."
        )
    if config.get("digest") != _digest(config):
        raise MemoryFormatError(
            f"{str(path)!r} was edited: its digest does not match. Restore it, or build the memory "
            f"again."
        )
    return config


def version_of(folder: Path) -> tuple[int, int] | None:
    """Return what changes whenever a memory's folder is replaced or resealed."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def download(repo_id: str, revision: str | None) -> Path:
    """Return the folder of a memory on the hub, downloaded unless it is there already."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    reached = True
    try:
        with hub_or_cache() as reached:
            return Path(snapshot_download(repo_id, revision=revision))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        why = f"the hub did not give it ({reason})" if reached else "the hub cannot be reached"
        raise MemoryFormatError(f"No memory at {repo_id!r}: no such folder, and {why}.") from None


def check_file(folder: Path, entry: Mapping[str, Any], *, contents: bool) -> Path:
    """Return the file of a config entry, after checking its size and, if wanted, its checksum.

    The entry has "file", a text, "bytes", a whole number, and "sha256".

    Raises:
        MemoryFormatError: The file is missing, another one, or not in `folder`.
    """
    name = str(entry["file"])
    if Path(name).name != name or len(os.fsencode(name)) > _LONGEST_NAME:
        raise MemoryFormatError(f"{str(folder)!r} names a file outside its folder: {name[:80]!a}.")
    path = folder / name
    if not path.is_file():
        raise MemoryFormatError(f"{str(path)!r} is missing: the memory is incomplete.")
    _check_inside(folder, path)
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise MemoryFormatError(
            f"{str(path)!r} is truncated or changed: {size:,} bytes instead of {entry['bytes']:,}."
        )
    if contents and checksum(path) != entry["sha256"]:
        raise MemoryFormatError(f"{str(path)!r} was edited: its checksum does not match.")
    return path


def _check_inside(folder: Path, path: Path) -> None:
    """Refuse a link to a file elsewhere. The hub's cache links to the blobs of the repository."""
    real, home = path.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if real.parent not in (home, blobs):
        raise MemoryFormatError(
            f"{str(path)!r} is a link to a file outside its folder. Copy the file there."
        )


def is_own_file(name: str) -> bool:
    """Tell whether a file of that name may be one of a memory's."""
    return bool(_OWN_FILE.fullmatch(name))


def resolve_target(folder: Path) -> Path:
    """Return the real path of a folder to write to; a link is followed.

    Raises:
        MemoryFormatError: No memory can be there.
    """
    try:
        target = folder.resolve()
        str(target).encode("utf8")
    except (ValueError, RuntimeError, OSError) as error:
        raise MemoryFormatError(f"No memory can be written to {str(folder)!a}: {error}.") from None
    if not target.name:
        raise MemoryFormatError(f"No memory can be written to {str(folder)!r}: it has no name.")
    return target


def refuse_existing(folder: Path, *, overwrite: bool) -> None:
    """Raise MemoryFormatError if `folder` exists, unless it is a memory, and nothing else, to
    overwrite."""
    if not folder.exists():
        return
    if not overwrite:
        raise MemoryFormatError(
            f"{str(folder)!r} exists already. Choose another folder, or overwrite it with "
            f"--overwrite (in Python overwrite=True)."
        )
    if not (folder / CONFIG_FILE).is_file():
        raise MemoryFormatError(f"{str(folder)!r} is not a memory and will not be overwritten.")
    others = sorted(path.name for path in folder.iterdir() if not is_own_file(path.name))
    if others:
        raise MemoryFormatError(
            f"{str(folder)!r} holds {others[0]!r} beside a memory and will not be overwritten. "
            f"Move it away, or choose another folder."
        )
    with suppress(FileNotFoundError):  # the current folder was deleted
        if Path.cwd().is_relative_to(folder.resolve()):
            raise MemoryFormatError(
                f"{str(folder)!r} is the current folder and will not be overwritten. Change to "
                f"another folder first."
            )


def publish(partial: Path, folder: Path, *, overwrite: bool, durable: bool = True) -> None:
    """Rename a finished folder into place, so that no reader ever sees half a memory.

    A link stays a link: what it points to is replaced.

    Args:
        partial: The finished memory, on the same file system. In the end nothing has its name.
        folder: The name it gets.
        overwrite: Replace a memory that has that name.
        durable: Wait until everything is on disk, so that a power cut loses neither memory.

    Raises:
        MemoryFormatError: As in `refuse_existing`.
    """
    folder = resolve_target(folder)
    refuse_existing(folder, overwrite=overwrite)
    if durable:
        sync_tree(partial)
    try:
        put_in_place(partial, folder)
    except FileExistsError:  # it has appeared since
        refuse_existing(folder, overwrite=False)
        raise
    shutil.rmtree(partial, ignore_errors=True)


def _digest(config: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in config.items() if name != "digest"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
