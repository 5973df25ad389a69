"""Choose a memory's language-model head: how many cases tell the next token, how near they must be,
and how much weight they have beside the model with its memory on.

Chosen by the examples to choose by, judged by those to judge by; a token recalls every example but
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.judge import Baseline, JudgedRecall
from knn_moe.build.optimise import batch_losses
from knn_moe.config import HeadConfig, RoutingConfig
from knn_moe.equations.next_token import mix_likelihoods
from knn_moe.recall.leave_one_out import Cases
from knn_moe.recall.neighbours import Neighbours
from knn_moe.reference.windows import Batch
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, input_device, install_hooks
from knn_moe.support.statistics import Comparison

KS: Final = (16, 64)
SCALES: Final = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0)  # of γ


@dataclass(frozen=True)
class HeadChoice:
    """A head, and how it changes the loss per token on the examples to judge by."""

    config: HeadConfig
    change: Comparison  # memory and head against the model alone
    added: Comparison  # against the model with its memory, without the head

    @property
    def helps(self) -> bool:
        """Whether the head is significantly better than the memory without it."""
        return self.added.significant and self.added.difference < 0


class NextTokens(NamedTuple):
    """T scored tokens, and what the nearest cases say of the next one.

    Shapes: own [T], its log-likelihood by the model with its memory; distance [T, K], γ d², inf
    where nothing followed a case; right [T, K] bool, whether the same token followed; line [T]
    int64, counted over all batches.
    """

    own: Tensor
    distance: Tensor
    right: Tensor
    line: Tensor

    def losses(self, config: HeadConfig) -> Tensor:
        """Return the loss of each token with a head. Shape [T]."""
        near = self.distance[:, : config.k], self.right[:, : config.k]
        ((_, mixed),) = mix_likelihoods(self.own, *near, 1 / config.gamma_scale, [config.weight])
        return -mixed


class _WideRecall(JudgedRecall):
    """Recalls as routing does, and also keeps the larger number of neighbours that a head needs."""

    def __init__(self, cases: Cases, config: RoutingConfig) -> None:
        super().__init__(cases, config)
        self.found = Neighbours(torch.empty(0), torch.empty(0))

    def nearest(self, inputs: Tensor) -> Neighbours:
        self.found = self.cases.nearest(inputs, self.owner, max(self.k, KS[-1]))
        return self.found.first(self.k)


def choose_head(
    model: nn.Module,
    cases: Sequence[Cases],
    following: Tensor,
    routing: RoutingConfig,
    parts: tuple[Baseline, Baseline],
) -> HeadChoice:
    """Choose the likeliest head on the first part, and judge it on the second.

    Shapes: following [M] int64, the token after each case, -1 for none.
    """
    choose, judge = parts
    config = likeliest_head(read_next_tokens(model, cases, following, routing, choose.batches))
    tokens = read_next_tokens(model, cases, following, routing, judge.batches)
    with_head, without = (
        torch.zeros(len(judge.losses), dtype=torch.float64).index_add(0, tokens.line, part.double())
        for part in (tokens.losses(config), -tokens.own)
    )
    return HeadChoice(
        config,
        change=judge.compare(with_head, judge.losses),
        added=judge.compare(with_head, without),
    )


def likeliest_head(tokens: NextTokens) -> HeadConfig:
    """Try all settings of a head on tokens whose neighbours were looked up once."""
    tried = []
    for k, scale in product(KS, SCALES):
        near = tokens.distance[:, :k], tokens.right[:, :k]
        for weight, mixed in mix_likelihoods(tokens.own, *near, 1 / scale):
            tried.append((-float(mixed.double().mean()), k, scale, weight))
    _, k, scale, weight = min(tried)
    return HeadConfig(k=k, gamma_scale=scale, weight=weight)


@torch.no_grad()
def read_next_tokens(
    model: nn.Module,
    cases: Sequence[Cases],
    following: Tensor,
    routing: RoutingConfig,
    batches: Sequence[Batch],
) -> NextTokens:
    """Read batches with the memory on, and look up the neighbours of the last layer's inputs."""
    used = [each for each in cases if routing.for_layer(each.router.layer).confidence_factor > 0]
    *others, last = sorted(used, key=lambda each: each.router.layer)
    wide = _WideRecall(last, routing)
    recalls = [*(JudgedRecall(each, routing) for each in others), wide]
    gamma = routing.gamma or last.gamma  # as inference/language_head.py has it
    following = following.to(last.keys.device)
    parts, lines = [], 0
    with freeze(model), install_hooks([RouterHook(each.cases.router, each) for each in recalls]):
        for batch in batches:
            for recall in recalls:
                recall.owner = batch.token_owner
            losses = batch_losses(model, batch.to(input_device(model)))
            found = _next_tokens(losses, batch, wide.found, following)
            parts.append(found._replace(distance=gamma * found.distance, line=found.line + lines))
            lines += len(batch.ids)
    return NextTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _next_tokens(losses: Tensor, batch: Batch, near: Neighbours, following: Tensor) -> NextTokens:
    """Match a batch's tokens with their neighbours, on the CPU, with d² as it was found.

    Shapes: losses [B, T - 1].
    """
    scored = batch.scored[:, :-1].cpu()
    line = torch.arange(len(scored))[:, None].expand_as(scored)
    distance, rows = (
        part.view(len(scored), -1, part.shape[-1])[:, :-1][scored.to(part.device)] for part in near
    )
    after = following[rows].cpu()
    targets = batch.ids[:, 1:].cpu()[scored]
    return NextTokens(
        own=-losses.cpu()[scored],
        distance=distance.cpu().masked_fill(after < 0, float("inf")),
        right=after == targets[:, None],
        line=line[scored],
    )
