"""Router bias on the fly: each question fits its own routing, with no reference set.

After Su et al. (2025, "Rewiring Experts on the Fly"): a vector b_l for each MoE layer is added to
the router's logits of all tokens, r = xW + b_l. It starts at 0 and takes S gradient steps down the
mean next-token loss of the question's own prompt; then the question is answered under it. They fit
again while they write, and in chosen layers only; here a question is fitted once, in every layer.

Of a text every token is scored, so none may be fitted on before: the bias is fitted on the first
half, and added from the second half on.

Knows questions as token ids, and routers; nothing of memories.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knn_moe.errors import ConfigError, RouterNotCalledError
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import TaskContext
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import forget_compiled_graphs, freeze, input_device
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


class Bias:
    """What is added to one router's logits. Shapes: rows [B, N] fp32, one for each sequence, whose
    tokens lie side by side; tokens before `start` of a sequence are left as they are."""

    def __init__(self, router: Router, rows: Tensor, start: int = 0) -> None:
        self.router = router
        self.rows = rows
        self.start = start
        self.called = False

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
                f"Router {self.router.name!r} was never called. A quantised or fused block may go "
                f"around it: load the model without (for GPT-OSS: Mxfp4Config(dequantize=True))."
            )


@contextmanager
def biased(biases: Sequence[Bias]) -> Iterator[None]:
    """While inside, routers add their bias."""
    forget_compiled_graphs()
    handles = []
    try:
        for bias in biases:
            handles += RouterHook(bias.router, bias).install()
        yield
    finally:
        for handle in handles:
            handle.remove()


def fit_bias(
    model: nn.Module, prompts: Sequence[Sequence[int]], config: RouterBiasConfig
) -> list[Tensor]:
    """A bias for each prompt, layer by layer: one pass and its gradient a step for all of them.

    The sum over prompts of their mean losses has no gradient from one to another. Gradients are
    those the model's own routing gives: of experts that were not chosen, only what π lets through.
    Shapes: B prompts of T_b ids each → for each router [B, N] fp32.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper would trace our hooks
    routers = find_routers(model)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        freeze(model),
        use_grouped_experts(model),
    ):
        biases = [
            Bias(router, torch.zeros(len(prompts), router.num_experts, device=router.device))
            for router in routers
        ]
        with biased(biases):
            for _ in range(config.steps):
                rows = [bias.rows.requires_grad_() for bias in biases]
                loss = prompt_losses(model, prompts).sum()
                for bias in biases:
                    bias.check_called()
                slopes = torch.autograd.grad(loss, rows, materialize_grads=True)
                for bias, slope in zip(biases, slopes, strict=True):
                    bias.rows = bias.rows.detach() - config.learning_rate * slope
    return [bias.rows for bias in biases]


def prompt_losses(model: nn.Module, prompts: Sequence[Sequence[int]]) -> Tensor:
    """The mean loss of each prompt's tokens but the first, 0 where there are none: one batch,
    padded on the right. Shapes: ids of T_b tokens each → [B] fp32."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    sizes = torch.tensor([[len(prompt)] for prompt in prompts])
    real = torch.arange(longest) < sizes
    mask = None if bool(real.all()) else real.long().to(input_device(model))
    output: Any = model(input_ids=ids.to(input_device(model)), attention_mask=mask, use_cache=False)
    logits = output.logits[:, :-1]
    targets = ids[:, 1:].masked_fill(~real[:, 1:], -100).to(logits.device)
    rows = zip(logits, targets, strict=True)
    losses = [F.cross_entropy(row.float(), target, reduction="sum") for row, target in rows]
    return torch.stack(losses) / (sizes[:, 0] - 1).clamp(min=1).to(logits.device)


@dataclass(frozen=True)
class RouterBias(Method):
    """The model with routing that each question fits to itself. No steps: the model alone."""

    config: RouterBiasConfig = field(default_factory=RouterBiasConfig)
    halves: bool = False  # texts: fitted on the first half, used in the second
    name: str = "router-bias"

    def facts(self) -> Mapping[str, Any]:
        return asdict(self.config)

    def make_answer(
        self, model: nn.Module, answer: Answer, batches: Sequence[Sequence[Question]]
    ) -> Answer:
        """Fitted a batch at a time, answered one by one: routers cannot tell whose row they see."""
        if not self.config.steps:
            return answer

        def one_by_one(batch: Sequence[Question], number: int) -> list[Sample]:
            routers = find_routers(model)
            fitted = fit_bias(model, [self.fitted_on(question) for question in batch], self.config)
            samples = []
            for place, question in enumerate(batch):
                start = len(question.ids) // 2 if self.halves else 0
                rows = [part[place : place + 1] for part in fitted]
                with biased([Bias(*pair, start) for pair in zip(routers, rows, strict=True)]):
                    samples += answer([question], number)
            # The loss of tokens a bias was fitted on says nothing beside another method's.
            return samples if self.halves else [replace(one, nll=None) for one in samples]

        return one_by_one

    def fitted_on(self, question: Question) -> list[int]:
        """What the bias is fitted on."""
        return question.ids[: len(question.ids) // 2] if self.halves else question.ids


def prepare_router_bias(context: TaskContext) -> RouterBias:
    return RouterBias(halves=context.scoring == TEXT)
