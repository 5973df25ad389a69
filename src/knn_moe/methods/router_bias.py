"""Router bias on the fly: the routing is fitted to each question, without a reference set.

After Su et al. (2025, "Rewiring Experts on the Fly"): in each MoE layer l a vector b_l is added to
the router's logits of all tokens, r = xW + b_l. It starts at 0 and takes S gradient steps on the
mean next-token loss of the question's own prompt; then the question is answered with it. The
authors fit again while they generate, and in chosen layers only; here the bias of a question is
fitted once, in every layer.

Every token of a text is scored, so no scored token may be fitted on: the bias is fitted on the
first half and added from the second half on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from knn_moe.equations.losses import next_token_losses
from knn_moe.errors import ConfigError, RouterNotCalledError
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import (
    forget_compiled_graphs,
    freeze,
    input_device,
    install_hooks,
    uncompiled,
)
from knn_moe.tasks.answers import Answer
from knn_moe.tasks.questions import Question
from knn_moe.tasks.sample import Sample
from knn_moe.tasks.task import TEXT


@dataclass(frozen=True, kw_only=True)
class RouterBiasConfig:
    """How a bias is fitted to a prompt."""

    steps: int = 5  # S, of plain gradient descent
    learning_rate: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ConfigError(f"steps must be at least 0, got {self.steps}.")
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"learning_rate must be positive, got {self.learning_rate}.")


class BiasHook:
    """Adds a bias to one router's logits.

    Shapes: rows [B, N] fp32, one row per sequence. Tokens before `start` of a sequence get no bias.
    """

    def __init__(self, router: Router, rows: Tensor, start: int = 0) -> None:
        self.router = router
        self.rows = rows
        self.start = start
        self.called = False

    def install(self) -> Sequence[RemovableHandle]:
        return RouterHook(self.router, self).install()

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        self.called = True
        sequences = logits.reshape(len(self.rows), -1, logits.shape[-1])
        added = sequences + self.rows[:, None]
        if self.start:
            places = torch.arange(sequences.shape[1], device=logits.device)
            added = torch.where((places < self.start)[:, None], sequences, added)
        return added.view_as(logits)

    def check_called(self) -> None:
        if not self.called:
            raise RouterNotCalledError(
                f"Router {self.router.name!r} was never called. A quantised or fused block may "
                f"bypass it: load the model without (for GPT-OSS: Mxfp4Config(dequantize=True))."
            )


@contextmanager
def add_biases(hooks: Sequence[BiasHook]) -> Iterator[None]:
    """Add biases to the routers' logits until the context is left."""
    forget_compiled_graphs()
    with install_hooks(hooks):
        yield


def fit_bias(
    model: nn.Module, prompts: Sequence[Sequence[int]], config: RouterBiasConfig
) -> list[Tensor]:
    """Fit a bias to each prompt, with one forward and backward pass per step for all of them.

    Prompts do not influence each other's bias, since their mean losses are summed. Gradients are
    those of the model's own routing: experts that are not chosen get only what π lets through.

    Shapes: B prompts of T_b ids each. Result: for each router [B, N] fp32.

    Raises:
        RouterNotCalledError: A router is bypassed, so that its bias has no effect.
    """
    model = uncompiled(model)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        freeze(model),
        use_grouped_experts(model),
    ):
        hooks = [
            BiasHook(router, torch.zeros(len(prompts), router.num_experts, device=router.device))
            for router in find_routers(model)
        ]
        with add_biases(hooks):
            for _ in range(config.steps):
                rows = [hook.rows.requires_grad_() for hook in hooks]
                loss = _mean_losses(model, prompts).sum()
                for hook in hooks:
                    hook.check_called()
                gradients = torch.autograd.grad(loss, rows, materialize_grads=True)
                for hook, gradient in zip(hooks, gradients, strict=True):
                    hook.rows = hook.rows.detach() - config.learning_rate * gradient
    return [hook.rows for hook in hooks]


def _mean_losses(model: nn.Module, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Return the mean next-token loss of each prompt [B] fp32, 0 for a prompt of one token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    sizes = torch.tensor([[len(prompt)] for prompt in prompts])
    real = torch.arange(longest) < sizes
    mask = None if bool(real.all()) else real.long().to(input_device(model))
    output: Any = model(input_ids=ids.to(input_device(model)), attention_mask=mask, use_cache=False)
    losses = next_token_losses(output.logits, ids, real.roll(-1, dims=1))
    return losses.sum(dim=1) / (sizes[:, 0] - 1).clamp(min=1).to(losses.device)


@dataclass(frozen=True)
class RouterBias(Method):
    """The model with a routing bias fitted to each question. Zero steps: the model alone."""

    config: RouterBiasConfig = field(default_factory=RouterBiasConfig)
    halves: bool = False  # for texts: fit on the first half, use in the second
    name: str = "router-bias"

    def facts(self) -> Mapping[str, Any]:
        return asdict(self.config)

    def make_answer(
        self, model: nn.Module, answer: Answer, batches: Sequence[Sequence[Question]]
    ) -> Answer:
        """Fit a batch at a time, but answer one by one: routers do not know whose row they see."""
        if not self.config.steps:
            return answer

        def answer_one_by_one(batch: Sequence[Question], number: int) -> list[Sample]:
            routers = find_routers(model)
            prompts = [self.fitting_tokens(question) for question in batch]
            fitted = fit_bias(model, prompts, self.config)
            samples = []
            for place, question in enumerate(batch):
                start = len(prompts[place]) if self.halves else 0
                rows = [part[place : place + 1] for part in fitted]
                hooks = [BiasHook(*pair, start) for pair in zip(routers, rows, strict=True)]
                with add_biases(hooks):
                    samples += answer([question], number)
            # The loss of tokens that a bias was fitted on cannot be compared between methods.
            return samples if self.halves else [replace(each, nll=None) for each in samples]

        return answer_one_by_one

    def fitting_tokens(self, question: Question) -> list[int]:
        """Return the tokens on which the bias of `question` is fitted."""
        return question.ids[: len(question.ids) // 2] if self.halves else question.ids


def prepare_router_bias(context: TaskContext) -> RouterBias:
    """Prepare nothing but whether texts are fitted by halves."""
    return RouterBias(halves=context.scoring == TEXT)
