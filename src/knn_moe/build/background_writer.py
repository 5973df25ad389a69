"""Carry a batch's cases from the device to disk while the next batch is computed.

Copies run on a stream of their own into pinned memory; threads write them. At most one batch is
under way: handing over the next waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from knn_moe.build.optimise import LayerCases
from knn_moe.errors import BuildError
from knn_moe.memory.writer import MemoryWriter
from knn_moe.reference.windows import Rows


class BackgroundWriter:
    """A context manager: leaving it waits until everything is written."""

    def __init__(self, writer: MemoryWriter, key_dtype: torch.dtype) -> None:
        self.writer = writer
        self.key_dtype = key_dtype
        self.pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
        self.buffers: dict[tuple[int, str], Tensor] = {}  # pinned; pinning anew costs more than use
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.pending: Future[None] | None = None
        self.copying: list[Tensor] = []

    def submit(
        self, cases: Mapping[int, LayerCases], rows: Rows, on_written: Callable[[], None]
    ) -> None:
        """Write the kept rows of every layer, and then, at once, call `on_written`."""
        self.wait()
        writes = []
        for layer, case in cases.items():
            parts = {
                "keys": case.inputs.to(self.key_dtype),
                "values": case.logits.float(),
            }
            hosts = {name: self._to_host((layer, name), part, rows) for name, part in parts.items()}
            writes.append(self.pool.submit(self._write, layer, hosts, rows))

        def finish() -> None:  # begins after the writes have: the pool is first in, first out
            for write in writes:
                write.result()
            on_written()

        self.pending = self.pool.submit(finish)

    def wait(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()
        self.copying = []

    def _write(
        self, layer: int, hosts: Mapping[str, tuple[Tensor, torch.cuda.Event | None]], rows: Rows
    ) -> None:
        for name, (host, copied) in hosts.items():
            if copied is not None:
                copied.synchronize()
            if name == "values" and not bool(host.isfinite().all()):
                raise BuildError(
                    f"Layer {layer}'s optimised logits are not finite. Lower the learning rate, or "
                    f"load the model in a wider precision."
                )
            self.writer.write(layer, name, host, rows.spans)

    def _to_host(
        self, place: tuple[int, str], tensor: Tensor, rows: Rows
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """The kept rows on the CPU, and the event after which they are there (None: already)."""
        if rows.kept is not None:
            tensor = tensor[rows.kept.to(tensor.device, non_blocking=True)]
        if not tensor.is_cuda:
            return tensor, None
        host = self._buffer(place, tensor)
        stream = self.streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        self.copying.append(tensor)  # its memory may be used again once `wait` has returned
        copied = torch.cuda.Event()
        copied.record(stream)
        return host, copied

    def _buffer(self, place: tuple[int, str], like: Tensor) -> Tensor:
        """Pinned memory for a tensor; free again, since the last batch has been written."""
        buffer = self.buffers.get(place)
        if buffer is None or len(buffer) < len(like):
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            self.buffers[place] = buffer
        return buffer[: len(like)]

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.wait()  # after an error too: what was computed is kept for a later run
        except Exception:
            if kind is None:
                raise
        finally:
            self.pool.shutdown(wait=True)
