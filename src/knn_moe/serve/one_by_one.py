"""One job at a time, with transformers' `generate`: for models that it cannot batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from knn_moe.inference.several import Memories
from knn_moe.inference.streaming import context_length
from knn_moe.routers.model_state import input_device
from knn_moe.serve.backend import Listener
from knn_moe.serve.jobs import Job
from knn_moe.serve.sampling import draw_tokens


class OneByOne:
    """A backend that runs one job at a time.

    Args:
        model: The model.
        routing: The memories on it.
        listener: Hears of jobs.
    """

    def __init__(self, model: Any, routing: Memories, listener: Listener) -> None:
        self.at_once = 1
        self.context = context_length(model) or 1 << 30
        self._model = model
        self._routing = routing
        self._listener = listener
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._taken: set[str] = set()  # jobs that have not ended
        self._cancelled: set[str] = set()
        self._running = threading.Lock()  # while the model runs
        self._thread = threading.Thread(target=self._run_all, daemon=True)

    def start(self) -> None:
        """See Backend."""
        self._thread.start()

    def run(self, job: Job) -> None:
        """See Backend."""
        self._taken.add(job.id)
        self._queue.put(job)

    def cancel(self, job: Job) -> None:
        """See Backend."""
        if job.id in self._taken:
            self._cancelled.add(job.id)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See Backend. The job that runs ends first."""
        with self._running:
            yield

    def whole_passes(self) -> AbstractContextManager[None]:
        """See Backend."""
        return self.pause()

    def stop(self, timeout: float | None) -> None:
        """See Backend."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run_all(self) -> None:
        while (job := self._queue.get()) is not None:
            error = None
            with self._running:
                if job.id not in self._cancelled:
                    try:
                        self._generate(job)
                    except Exception as failed:  # of a model: one job's, not the server's
                        error = f"{type(failed).__name__}: {failed}"
            self._taken.discard(job.id)
            if job.id in self._cancelled:
                self._cancelled.discard(job.id)
            else:
                self._listener.on_end(job, error)

    @torch.no_grad()
    def _generate(self, job: Job) -> None:
        ids = torch.tensor([list(job.prompt)], device=input_device(self._model))
        with self._routing.using(job.memory):
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job.max_tokens,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                eos_token_id=sorted(job.ends) or None,
                pad_token_id=0,
                logits_processor=[_Draw(job, self._listener)],
                stopping_criteria=[_Cancelled(job, self._cancelled)],
            )


class _Draw(LogitsProcessor):
    """Leaves only the token that was drawn."""

    def __init__(self, job: Job, listener: Listener) -> None:
        self._job = job
        self._listener = listener

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = draw_tokens([self._job.drawer], scores)[0]
        self._listener.on_token(self._job, token)
        only = torch.full_like(scores, float("-inf"))
        only[0, token.id] = 0.0
        return only


class _Cancelled(StoppingCriteria):
    """Ends a job that was cancelled."""

    def __init__(self, job: Job, cancelled: set[str]) -> None:
        self._job = job
        self._cancelled = cancelled

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Any:
        stopped = self._job.id in self._cancelled
        return torch.full((len(input_ids),), stopped, device=input_ids.device)
