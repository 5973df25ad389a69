"""Many jobs at once, over transformers' continuous batching.

The only file that knows `ContinuousBatchingManager`. Of its insides it uses two: the requests of
the batch under way, in the order of their tokens, and where outputs go. Blocks of the cache are
never shared between requests: what one memory routed is no other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

from knn_moe.inference.several import Memories
from knn_moe.inference.streaming import context_length
from knn_moe.serve.backend import Listener
from knn_moe.serve.jobs import Job
from knn_moe.serve.sampling import draw_tokens

_PAGE: Final = 32  # tokens of a block of the cache
_STEP_TOKENS: Final = 512  # read in a step: longer prompts are read in parts


class Batches:
    """A backend that runs many jobs at once.

    Args:
        model: The model.
        routing: The memories on it.
        listener: Hears of jobs.
        at_once: Jobs that run at the same time.
        cache_tokens: Tokens that all of them together keep in the cache. Where that is too few,
            jobs are put off and read again.

    Raises:
        Exception: transformers cannot batch the model; each reason has its own type.
    """

    def __init__(
        self, model: Any, routing: Memories, listener: Listener, at_once: int, cache_tokens: int
    ) -> None:
        self.at_once = at_once
        self._model = model
        self._routing = routing
        self._listener = listener
        self._jobs: dict[str, Job] = {}
        config = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=-(-cache_tokens // _PAGE),
            max_batch_tokens=max(_STEP_TOKENS, at_once),
            max_requests_per_batch=at_once,
            max_blocks_per_request=0,
            allow_block_sharing=False,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        self._attention = model.config._attn_implementation
        self._manager = _Manager(model, config, self)
        try:
            processor = self._manager._create_batch_processor()
        except BaseException:
            self._manager.restore_attention()
            raise
        self._manager.batch_processor = processor
        longest = infer_max_single_request_tokens(processor.cache)
        self.context = min(context_length(model) or longest, longest)

    def start(self) -> None:
        """See Backend."""
        self._manager.start()

    def run(self, job: Job) -> None:
        """See Backend."""
        self._jobs[job.id] = job
        ends = sorted(job.ends) or -1
        taken = self._manager.add_request(
            list(job.prompt), job.id, max_new_tokens=job.max_tokens, eos_token_id=ends
        )
        if taken is None:
            self.end(job.id, "The engine has stopped.")

    def cancel(self, job: Job) -> None:
        """See Backend."""
        if self._jobs.pop(job.id, None) is not None:
            self._manager.cancel_request(job.id)

    def pause(self) -> AbstractContextManager[None]:
        """See Backend."""
        pause: AbstractContextManager[None] = self._manager.pause()
        return pause

    @contextmanager
    def whole_passes(self) -> Iterator[None]:
        """See Backend. Attention that reads the cache's blocks is put aside."""
        with self.pause():
            paged = self._model.config._attn_implementation
            self._model.set_attn_implementation(self._attention)
            try:
                yield
            finally:
                self._model.set_attn_implementation(paged)

    def stop(self, timeout: float | None) -> None:
        """See Backend."""
        if self._manager.is_running():
            self._manager.stop(timeout=timeout, hard_stop=True)
        else:
            self._manager.restore_attention()

    @contextmanager
    def step(self, requests: Sequence[Any]) -> Iterator[None]:
        """Choose the memory of each token of the batch that runs inside."""
        owners = [
            (self._memory(request.state.request_id), request.query_length) for request in requests
        ]
        self._due = [
            self._jobs.get(request.state.request_id)
            for request in requests
            if request.has_new_token
        ]
        with self._routing.using_flat(owners):
            yield

    def _memory(self, id: str) -> str | None:
        job = self._jobs.get(id)
        known = job is not None and job.memory in self._routing.memories
        return job.memory if job is not None and known else None

    def draw(self, scores: Tensor) -> list[int]:
        """Draw the tokens that are due, and tell the listener. Shapes: scores [n, V]."""
        due = self._due
        drawers = [None if job is None else job.drawer for job in due]
        tokens = draw_tokens(drawers, scores[: len(due)])
        for job, token in zip(due, tokens, strict=True):
            if job is not None and job.id in self._jobs:
                self._listener.on_token(job, token)
        return [token.id for token in tokens]

    def end(self, id: str, error: str | None) -> None:
        """Note that a request has ended."""
        job = self._jobs.pop(id, None)
        if job is not None:
            self._listener.on_end(job, error)

    def fail(self, error: Exception) -> None:
        """Note that the manager stops, and all requests with it."""
        self._jobs.clear()
        self._listener.on_failure(f"{type(error).__name__}: {error}")


class _Manager(ContinuousBatchingManager):
    """The manager, which draws tokens and hands out results in our way."""

    def __init__(self, model: Any, config: ContinuousBatchingConfig, batches: Batches) -> None:
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
        super().__init__(model, greedy, config)
        processors = LogitsProcessorList([_Draw(batches)])
        self.logit_processor = ContinuousBatchingLogitsProcessorList(processors)
        self.output_router = _Outputs(batches)
        self._batches = batches

    def restore_attention(self) -> None:
        """Give the model the attention back that it had, where the loop never ran."""
        original: str | None = self._original_attn_impl
        if original is not None:
            self.model.set_attn_implementation(original)
            self._original_attn_impl = None

    def _generation_step(self) -> None:
        processor: Any = self.batch_processor
        with self._batches.step(processor.inputs_and_outputs.requests_in_batch):
            super()._generation_step()

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        self._batches.fail(error)
        super()._handle_critical_error(error, batch_processor)


class _Draw(LogitsProcessor):
    """Leaves of each row only the token that was drawn for it: the largest is taken then."""

    supports_continuous_batching = True

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = self._batches.draw(scores)
        only = torch.full_like(scores, float("-inf"))
        rows = torch.arange(len(ids), device=scores.device)
        only[rows, torch.tensor(ids, device=scores.device, dtype=torch.int64)] = 0.0
        return only


class _Outputs(OutputRouter):
    """Hears of requests that have ended; tokens were told before."""

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self._batches = batches

    def deliver(self, output: Any) -> None:
        if output.is_finished():
            self._batches.end(output.request_id, output.error)

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)
