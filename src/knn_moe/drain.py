"""Carry a batch's cases from the device to disk while the next batch is computed.

Copies run on a stream of their own into pinned memory; threads write them. At most one batch is
under way: handing over the next waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from knn_moe.batches import Rows
from knn_moe.optimise import LayerCases
from knn_moe.writer import MemoryWriter


class Drain:
    """A context manager: leaving it waits until everything is written."""

    def __init__(self, writer: MemoryWriter, key_dtype: torch.dtype) -> None:
        self.writer = writer
        self.key_dtype = key_dtype
        self.pool = ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1))
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.pending: list[Future[None]] = []
        self.on_written: Callable[[], None] = lambda: None

    def submit(
        self, cases: Mapping[int, LayerCases], rows: Rows, on_written: Callable[[], None]
    ) -> None:
        """Write the kept rows of every layer, then call `on_written` (from this thread)."""
        self.wait()
        self.on_written = on_written
        for layer, case in cases.items():
            keys, keys_ready = self._to_host(case.inputs, rows.kept, self.key_dtype)
            values, values_ready = self._to_host(case.logits, rows.kept, torch.float32)
            arguments = (layer, keys, values, rows, (keys_ready, values_ready))
            self.pending.append(self.pool.submit(self._write, *arguments))

    def wait(self) -> None:
        for future in self.pending:
            future.result()
        if self.pending:
            self.on_written()
        self.pending = []

    def _write(
        self, layer: int, keys: Tensor, values: Tensor, rows: Rows, ready: tuple[Any, ...]
    ) -> None:
        for event in ready:
            if event is not None:
                event.synchronize()
        for row, start, count in rows.spans:
            part = slice(start, start + count)
            self.writer.write(layer, row, keys[part], values[part])

    def _to_host(
        self, tensor: Tensor, kept: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """The kept rows on the CPU, and the event after which they are there (None: already)."""
        if not tensor.is_cuda:
            return tensor[kept].to(dtype), None
        device = tensor.device
        if not bool(kept.all()):
            tensor = tensor[kept.to(device, non_blocking=True)]
        tensor = tensor.to(dtype)
        stream = self.streams.setdefault(device, torch.cuda.Stream(device))
        host = torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        event = torch.cuda.Event()
        event.record(stream)
        return host, event

    def __enter__(self) -> Drain:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.pool.shutdown(wait=True)
