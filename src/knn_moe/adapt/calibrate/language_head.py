"""Choose a memory's language-model head: which keys it looks up, how many cases tell the next
token, how near they must be, how much weight they have, and whether the memory routes beside it.

Each kind of head is tried with the chosen routing and without any, which is a kNN-LM alone. Chosen
by the examples to choose by, judged by those to judge by; a token recalls every example but its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from knn_moe.adapt.calibrate.judge import Baseline, JudgedRecall
from knn_moe.build.optimise import batch_losses
from knn_moe.config import HeadConfig, RoutingConfig
from knn_moe.equations.next_token import KS, likeliest_mixture, mix_likelihoods
from knn_moe.index.leave_one_out import search_leaving_out
from knn_moe.inference.hidden_states import HiddenStateHook, read_hidden_states
from knn_moe.memory.head_keys import HeadKeys
from knn_moe.memory.memory import RoutingMemory
from knn_moe.recall.leave_one_out import Cases
from knn_moe.reference.provenance import owners
from knn_moe.reference.windows import Batch
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, input_device, install_hooks
from knn_moe.support.statistics import Comparison


@dataclass(frozen=True)
class HeadTrial:
    """The likeliest head of its kind, and its loss per token on the examples to choose by."""

    config: HeadConfig
    loss: float


@dataclass(frozen=True)
class HeadChoice:
    """A head, and how it changes the loss per token on the examples to judge by."""

    config: HeadConfig
    change: Comparison  # what is used with the head, against the model alone
    added: Comparison  # against what is used without the head
    examples: int = 0  # to judge by
    tried: tuple[HeadTrial, ...] = ()
    keys: HeadKeys | None = field(default=None, repr=False)  # where the head looks up hidden states

    @property
    def helps(self) -> bool:
        """Whether the head is surely better than doing without it."""
        return self.added.surely_less(self.examples)

    def report(self) -> dict[str, Any]:
        """Return the findings as a memory's config keeps them."""
        return {
            "helps": self.helps,
            "config": asdict(self.config),
            "change": asdict(self.change),
            "added": asdict(self.added),
            "tried": [{**asdict(trial.config), "loss": trial.loss} for trial in self.tried],
        }


class NextTokens(NamedTuple):
    """T scored tokens, and what the nearest cases say of the next one.

    Shapes: own [T], its log-likelihood by the model, with its memory or alone; distance [T, K],
    γ d², inf where nothing followed a case; right [T, K] bool, whether the same token followed;
    line [T] int64, counted over all batches.
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

    def likeliest_head(self, keys: str = "router", *, alone: bool = False) -> HeadTrial:
        """Try all settings of a head that looks up these neighbours."""
        ks = sorted({min(k, self.distance.shape[1]) for k in KS})
        best = likeliest_mixture(self.own, self.distance, self.right, ks)
        # Rounded, so that what is tried is what is written down.
        scale = float(f"{1 / best.temperature:.4g}")
        config = HeadConfig(k=best.k, weight=best.weight, gamma_scale=scale, keys=keys, alone=alone)
        return HeadTrial(config, float(self.losses(config).double().mean()))


@dataclass(frozen=True)
class TokenCases:
    """Keys that a head may look up, and the token that followed each.

    Shapes: keys [M, d]; owner [M] int64, a hash of each case's example; following [M] int64, -1
    where there is none.
    """

    keys: Tensor
    owner: Tensor
    following: Tensor
    gamma: float

    @classmethod
    def of(cls, stored: HeadKeys, memory: RoutingMemory, device: torch.device) -> TokenCases:
        """Put head keys on `device`, without the cases that no token followed."""
        owner = owners(memory.provenance)[memory.provenance.window]
        following = memory.provenance.following
        told = following >= 0
        keys, owner, following = (
            column[told].to(device) for column in (stored.keys, owner, following)
        )
        return cls(keys, owner, following, stored.gamma)

    def nearest(self, queries: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """Return γ d² of the nearest cases of other examples, and the tokens that followed them.

        Shapes: queries [T, d]; owner [T] → [T, K] on the CPU, twice.
        """
        labels = [(owner, self.owner)]
        device = self.keys.device
        queries = queries.to(device, self.keys.dtype)
        distance, rows = search_leaving_out(queries, self.keys, labels, KS[-1], device)
        after = self.following[rows].cpu()
        return self.gamma * distance.cpu().masked_fill(after < 0, float("inf")), after


class _Recorder:
    """Keeps what a router read, and recalls, if it should."""

    inputs: Tensor

    def __init__(self, recall: JudgedRecall | None) -> None:
        self.recall = recall

    def __call__(self, inputs: Tensor, logits: Tensor) -> Tensor:
        self.inputs = inputs
        return logits if self.recall is None else self.recall(inputs, logits)


class HeadReader:
    """Reads tokens as `routing` uses a memory, and looks up the neighbours of both kinds of keys.

    The hidden states to look in are read with the same routing, each case without its own example:
    what the model reads later is compared with them.

    Args:
        model: The model alone.
        cases: The cases of every layer.
        memory: The memory, of whose tokens hidden states are read.
        routing: How the memory is used; with a head that is used alone, not at all.
    """

    def __init__(
        self,
        model: nn.Module,
        cases: Sequence[Cases],
        memory: RoutingMemory,
        routing: RoutingConfig,
    ) -> None:
        self.model = model
        by_layer = {each.router.layer: each for each in cases}
        self.recalls = {
            layer: JudgedRecall(each, routing)
            for layer, each in by_layer.items()
            if routing.for_layer(layer).confidence_factor > 0
        }
        layer = max(self.recalls or by_layer)  # as inference/attach.py has it
        last = by_layer[layer]
        self.recorder = _Recorder(self.recalls.get(layer))
        self.states = HiddenStateHook(model)
        self.hooks = [
            RouterHook(each.cases.router, each)
            for number, each in self.recalls.items()
            if number != layer
        ]
        self.hooks.append(RouterHook(last.router, self.recorder))
        following = memory.provenance.following.to(last.keys.device)
        self.stored = self._read_keys(memory)
        self.cases = {
            "router": TokenCases(last.keys, last.owner, following, routing.gamma or last.gamma),
            "hidden": TokenCases.of(self.stored, memory, self.states.device),
        }

    def _read_keys(self, memory: RoutingMemory) -> HeadKeys:
        reference, batch_tokens = memory.reference_tokens(), memory.build.batch_tokens
        with install_hooks(self.hooks):
            keys = read_hidden_states(self.model, reference, batch_tokens, self._begin)
        return HeadKeys.of(keys, memory.provenance)

    def _begin(self, batch: Batch) -> None:
        for recall in self.recalls.values():
            recall.begin(batch)

    @torch.no_grad()
    def read(self, batches: Sequence[Batch]) -> dict[str, NextTokens]:
        """Read batches, and return what each kind of keys says of their tokens."""
        parts: dict[str, list[NextTokens]] = {name: [] for name in self.cases}
        lines = 0
        with freeze(self.model), install_hooks([*self.hooks, self.states]):
            for batch in batches:
                self._begin(batch)
                losses = batch_losses(self.model, batch.to(input_device(self.model)))
                for name, found in self._look_up(batch, losses).items():
                    parts[name].append(found._replace(line=found.line + lines))
                lines += len(batch.ids)
        return {
            name: NextTokens(*(torch.cat(column) for column in zip(*part, strict=True)))
            for name, part in parts.items()
        }

    def _look_up(self, batch: Batch, losses: Tensor) -> dict[str, NextTokens]:
        """Match a batch's scored tokens with their neighbours. Shapes: losses [B, T - 1]."""
        scored = batch.scored[:, :-1].cpu()
        shape = batch.ids.shape
        targets = batch.ids[:, 1:].cpu()[scored]
        owner = batch.token_owner.view(shape)[:, :-1][scored]
        line = torch.arange(len(scored))[:, None].expand_as(scored)[scored]
        read = {"router": self.recorder.inputs, "hidden": self.states.take(shape)}
        found = {}
        for name, inputs in read.items():
            queries = inputs.view(*shape, -1)[:, :-1][scored.to(inputs.device)]
            distance, after = self.cases[name].nearest(queries, owner)
            right = after == targets[:, None]
            found[name] = NextTokens(-losses.cpu()[scored], distance, right, line)
        return found


def choose_head(
    model: nn.Module,
    cases: Sequence[Cases],
    memory: RoutingMemory,
    routing: RoutingConfig,
    parts: tuple[Baseline, Baseline],
    *,
    routed: bool,
) -> HeadChoice:
    """Choose the likeliest head on the first part, and judge it on the second.

    Args:
        model: The model alone.
        cases: The cases of every layer.
        memory: The memory.
        routing: How the memory is used.
        parts: The examples to choose by, and those to judge by.
        routed: Whether routing helps. If not, only heads without routing are tried.
    """
    choose, judge = parts
    ways = {False: replace(routing, head=None)} if routed else {}
    ways[True] = replace(routing, head=HeadConfig(alone=True))
    readers = {alone: HeadReader(model, cases, memory, way) for alone, way in ways.items()}
    tried = [
        tokens.likeliest_head(keys, alone=alone)
        for alone, reader in readers.items()
        for keys, tokens in reader.read(choose.batches).items()
    ]
    config = min(tried, key=lambda trial: trial.loss).config
    tokens = readers[config.alone].read(judge.batches)[config.keys]
    with_head, without = tokens.losses(config), -tokens.own
    if config.alone and routed:
        without = -readers[False].read(judge.batches)[config.keys].own
    lines = torch.zeros(len(judge.losses), dtype=torch.float64)
    with_head, without = (
        lines.index_add(0, tokens.line, part.double()) for part in (with_head, without)
    )
    return HeadChoice(
        config,
        change=judge.compare(with_head, judge.losses),
        added=judge.compare(with_head, without),
        examples=judge.examples,
        tried=tuple(tried),
        keys=readers[config.alone].stored if config.keys == "hidden" else None,
    )
