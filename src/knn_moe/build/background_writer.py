"""Write a batch's cases to disk while the next batch is computed.

Copies run on a stream of their own into pinned memory; threads write them. At most one batch is
under way: submitting the next waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from knn_moe.build.optimise import OptimisedLayer
from knn_moe.errors import BuildError
from knn_moe.memory.writer import MemoryWriter
from knn_moe.reference.windows import Batch


class BackgroundWriter:
    """Writes batches in the background. Leaving the context waits until all of them are written."""

    def __init__(self, writer: MemoryWriter, key_dtype: torch.dtype) -> None:
        self.writer = writer
        self.key_dtype = key_dtype
        self.pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
        self.buffers: dict[tuple[int, str], Tensor] = {}  # pinned; pinning anew costs more than use
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.pending: Future[None] | None = None
        self.copying: list[Tensor] = []

    def submit(
        self,
        layers: Mapping[int, OptimisedLayer],
        batch: Batch,
        on_written: Callable[[list[int]], None],
    ) -> None:
        """Write the kept rows of every layer, then call `on_written` with their CRC-32: of keys and
        values, layer by layer."""
        self.wait()
        writes = []
        for layer, found in layers.items():
            parts = {"keys": found.inputs.to(self.key_dtype), "values": found.logits.float()}
            hosts = {
                name: self._to_host((layer, name), part, batch) for name, part in parts.items()
            }
            writes.append(self.pool.submit(self._write, layer, hosts, batch))

        def finish() -> None:  # begins after the writes have: the pool is first in, first out
            on_written([crc for write in writes for crc in write.result()])

        self.pending = self.pool.submit(finish)

    def wait(self) -> None:
        """Wait until the last batch is written."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()
        self.copying = []

    def _write(
        self, layer: int, hosts: Mapping[str, tuple[Tensor, torch.cuda.Event | None]], batch: Batch
    ) -> list[int]:
        crcs = []
        for name, (host, copied) in hosts.items():
            if copied is not None:
                copied.synchronize()
            if name == "values" and not bool(host.isfinite().all()):
                raise BuildError(
                    f"Layer {layer}'s optimised logits are not finite. Lower the learning rate, or "
                    f"load the model in a wider precision."
                )
            crcs.append(self.writer.write(layer, name, host, batch.spans))
        return crcs

    def _to_host(
        self, place: tuple[int, str], tensor: Tensor, batch: Batch
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return the kept rows on the CPU, and the event after which they are there (None: now)."""
        if batch.kept_places is not None:
            tensor = tensor[batch.kept_places.to(tensor.device, non_blocking=True)]
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
        """Return pinned memory for a tensor. It is free, since the last batch has been written."""
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
