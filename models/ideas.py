"""Ideas to make a memory better, each measured alone: docs/research.md has what came of them.

    python models/ideas.py tiny-olmoe tiny-qwen3 OUT/olmoe-80m --out docs/measurements/ideas

One strong memory of medical text for each model. Ideas about *targets* give its cases other values;
ideas about *use* give the mixing more to fit. Whatever the idea, the kernels of every layer are
fitted for it by leave-one-example-out (K = 16), and it is tried on a slice of the training text
that no memory holds: the test split takes no part in what is kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import encode, read_texts, sample_texts, windows
from knn_moe import RoutingConfig, attach, find_routers
from knn_moe.batches import make_batch, plan_batches
from knn_moe.calibration.fit import Cases, find_neighbours, fit_kernels, recalled_loss
from knn_moe.calibration.kernels import Kernels
from knn_moe.calibration.slices import Slice, own_reference
from knn_moe.calibration.values import learn_values
from knn_moe.dense import dense_gradient
from knn_moe.gate import own_logits
from knn_moe.index.exact import ExactIndex, squared_distance
from knn_moe.intercept import RouterHook
from knn_moe.likelihood import TokenLosses, token_losses
from knn_moe.memory import RoutingMemory
from knn_moe.mixing import confidence, mix_logits, propose_logits
from knn_moe.optimise import RoutingLogits, TokenBatch, frozen, installed
from knn_moe.provenance import owners
from measure import LENGTH, Bench, common_parser, compare

K, STEPS, RATE = 16, 5, 2.0
FIT_STEPS = 96
Step = Callable[[list[Tensor], list[Tensor], Tensor], list[Tensor]]


def main() -> None:
    parser = common_parser((__doc__ or "").splitlines()[0], windows=100)
    parser.add_argument("--only", nargs="*", help="ideas by name")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        bench = Bench.load(name, options.data, options.device)
        rows = []
        for row in study(bench, options):
            rows.append(row)
            print(Path(name).name, row, flush=True)
        found = {"model": Path(name).name, "sequences": options.sequences, "rows": rows}
        text = json.dumps(found, indent=1)
        (options.out / f"{Path(name).name}.json").write_text(f"{text}\n", encoding="utf8")


def study(bench: Bench, options: Any) -> Iterator[dict[str, Any]]:
    """One row for each idea."""
    tokens = options.sequences * LENGTH
    texts = read_texts(bench.data, "medical", "train")
    held = sample_texts(bench.tokenizer, texts, options.windows * LENGTH, skip=tokens)
    trial = windows(encode(bench.tokenizer, held), LENGTH).long()
    alone = bench.losses(trial)
    memory = bench.build("medical", "strong", options.sequences)
    yield {"idea": "strong", "kind": "as it is", **compare(bench.losses(trial, memory), alone)}
    work = Work(bench, memory)

    def wanted(name: str) -> bool:
        return not options.only or name in options.only

    for name, step in TARGETS.items():
        if wanted(name):
            started = time.perf_counter()
            cases = work.cases if name == "plain" else work.with_targets(step)
            kernels = fit_kernels(bench.model, cases, work.studied, K, FIT_STEPS)
            seconds = round(time.perf_counter() - started, 1)
            found = work.losses(trial, cases, RoutingConfig(k=K, kernels=kernels))
            yield {"idea": name, "kind": "targets", "seconds": seconds, **compare(found, alone)}
    for name, more in USES.items():
        if wanted(name):
            started = time.perf_counter()
            mixing = work.fit(more)
            seconds = round(time.perf_counter() - started, 1)
            found = work.tried(trial, mixing)
            yield {"idea": name, "kind": "use", "seconds": seconds, **compare(found, alone)}
    for rate in (0.05, 0.1, 0.2):
        name = f"values learned at {rate:g}"
        if wanted(name):
            started = time.perf_counter()
            kernels = fit_kernels(bench.model, work.cases, work.studied, K, FIT_STEPS)
            start = RoutingConfig(k=K, kernels=kernels)
            kernels, cases = learn_values(bench.model, work.cases, work.studied, start, 2, rate)
            seconds = round(time.perf_counter() - started, 1)
            found = work.losses(trial, cases, RoutingConfig(k=K, kernels=kernels))
            yield {"idea": name, "kind": "values", "seconds": seconds, **compare(found, alone)}


class Work:
    """A memory taken apart: its reference tokens, its cases, and each token's neighbours."""

    def __init__(self, bench: Bench, memory: RoutingMemory) -> None:
        self.bench = bench
        self.memory = memory
        self.reference = own_reference(memory)
        owner = owners(memory.provenance)
        layers = memory.full_layers()
        self.cases = [
            Cases.of(router, layers[router.layer], owner[memory.provenance.window])
            for router in find_routers(bench.model)
        ]
        part = Slice(self.reference, list(range(len(owner))), owner)
        size = min(bench.batch_tokens, max(len(memory) // 24, 64))
        readings = list(part.readings(size))
        self.studied = find_neighbours(bench.model, self.cases, readings, K)

    def with_targets(self, step: Step) -> list[Cases]:
        """The same keys, with values that another way of descending found."""
        values = [torch.empty_like(each.values) for each in self.cases]
        device = self.bench.model.device
        with frozen(self.bench.model):
            for numbers in plan_batches(self.reference.lengths, self.bench.batch_tokens):
                batch, rows = make_batch(self.reference, numbers)
                found = descend(self.bench.model, batch.to(device), step)
                for whole, part in zip(values, found, strict=True):
                    kept = part if rows.kept is None else part[rows.kept.to(device)]
                    for span in rows.spans:
                        place = slice(span.row, span.row + span.rows)
                        whole[place] = kept[span.start : span.start + span.rows]
        return [replace(each, values=part) for each, part in zip(self.cases, values, strict=True)]

    def losses(self, trial: Tensor, cases: Sequence[Cases], config: RoutingConfig) -> TokenLosses:
        """As attached, with the values of `cases`."""
        layers = dict(self.memory.full_layers())
        for each in cases:
            layer = layers[each.router.layer]
            layers[each.router.layer] = replace(layer, values=each.values.cpu())
        memory = replace(self.memory, layers=layers, folder=None)
        with attach(self.bench.model, memory, config):
            return token_losses(self.bench.model, trial, max(self.bench.batch_tokens // LENGTH, 1))

    def fit(self, more: type[More]) -> list[More]:
        """Kernels and what the idea adds, fitted together."""
        model, device = self.bench.model, self.bench.model.device
        kernels = Kernels({each.router.layer: each.gamma for each in self.cases}, device)
        mixing = [more(each, kernels) for each in self.cases]
        parameters = [*kernels.parameters()]
        for one in mixing:
            parameters += one.parameters()
        adam = torch.optim.Adam(parameters, lr=0.1)
        chance = torch.Generator().manual_seed(0)
        count = len(self.studied.readings)
        order = torch.cat([torch.randperm(count, generator=chance) for _ in range(FIT_STEPS)])
        hooks = [RouterHook(one.cases.router, one) for one in mixing]
        with frozen(model), torch.enable_grad(), installed(hooks):
            for step, place in enumerate(order[:FIT_STEPS].tolist()):
                summed, scored = recalled_loss(model, mixing, self.studied, place)  # type: ignore[arg-type]
                adam.zero_grad()
                (summed / scored).backward()
                adam.param_groups[0]["lr"] = 0.1 * (1 - step / FIT_STEPS)
                adam.step()
        return mixing

    @torch.no_grad()
    def tried(self, trial: Tensor, mixing: Sequence[More]) -> TokenLosses:
        """Every search afresh."""
        for one in mixing:
            one.searched()
        with installed([RouterHook(one.cases.router, one) for one in mixing]):
            return token_losses(self.bench.model, trial, max(self.bench.batch_tokens // LENGTH, 1))


# Targets: other ways down the same slope


def descend(model: nn.Module, batch: TokenBatch, step: Step) -> list[Tensor]:
    """Logits of every token after STEPS steps, by layer [B·T, N]; as optimise.py, but for `step`,
    which is given the logits, their slopes and each token's own loss."""
    layers = [RoutingLogits(router) for router in find_routers(model)]
    hooks = [dense_gradient(model, layer.router, layer) for layer in layers]
    with torch.enable_grad(), installed(hooks):
        for _ in range(STEPS):
            mask = batch.real.long() if batch.padded else None
            logits = model(input_ids=batch.ids, attention_mask=mask, use_cache=False).logits
            targets = batch.ids[:, 1:].masked_fill(~batch.scored[:, :-1], -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(),
                                   reduction="none").view(targets.shape)  # fmt: skip
            leaves = [layer.cases.logits for layer in layers]
            slopes = torch.autograd.grad(loss.sum(), leaves)
            own = F.pad(loss.detach(), (0, 1)).flatten()
            moved = step([leaf.detach() for leaf in leaves], list(slopes), own)
            for layer, leaf in zip(layers, moved, strict=True):
                layer._leaf = leaf.requires_grad_()
    return [layer.cases.logits.detach() for layer in layers]


def plain(logits: list[Tensor], slopes: list[Tensor], own: Tensor) -> list[Tensor]:
    """r - η ∂L/∂r."""
    return [one - RATE * slope for one, slope in zip(logits, slopes, strict=True)]


def normalised(logits: list[Tensor], slopes: list[Tensor], own: Tensor) -> list[Tensor]:
    """Each token's step in each layer is as long as the others': a trust region of 0.3."""
    return [
        one - 0.3 * slope / slope.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        for one, slope in zip(logits, slopes, strict=True)
    ]


def clipped(logits: list[Tensor], slopes: list[Tensor], own: Tensor) -> list[Tensor]:
    """No step is longer than 0.5."""
    steps = [RATE * slope for slope in slopes]
    lengths = [step.norm(dim=-1, keepdim=True).clamp(min=1e-12) for step in steps]
    shrink = [(0.5 / length).clamp(max=1) for length in lengths]
    return [one - step * less for one, step, less in zip(logits, steps, shrink, strict=True)]


def signs(logits: list[Tensor], slopes: list[Tensor], own: Tensor) -> list[Tensor]:
    """Adam's first step, again and again: the slope's signs, of a size."""
    return [one - 0.1 * slope.sign() for one, slope in zip(logits, slopes, strict=True)]


def until_right(logits: list[Tensor], slopes: list[Tensor], own: Tensor) -> list[Tensor]:
    """Tokens that are right already (p > 0.5) stay where they are."""
    wrong = (own > 0.6931).float()[:, None]
    return [one - RATE * wrong * slope for one, slope in zip(logits, slopes, strict=True)]


TARGETS: dict[str, Step] = {
    "plain": plain,
    "normalised steps": normalised,
    "clipped steps": clipped,
    "signs": signs,
    "until right": until_right,
}


# Use: more to fit than the kernels


class More(nn.Module):
    """A layer's mixing with the kernels' three numbers and no more; ideas add to it."""

    def __init__(self, cases: Cases, kernels: Kernels) -> None:
        super().__init__()
        self.cases = cases
        self.kernels = [kernels]  # not a part of this module: all layers share it
        self.rows = torch.empty(0)
        self.index: ExactIndex | None = None

    def searched(self) -> None:
        self.index = ExactIndex(self.cases.keys)

    def distance(self, inputs: Tensor, rows: Tensor) -> Tensor:
        return squared_distance(inputs.detach()[:, None], self.cases.keys[rows])

    def values(self, rows: Tensor, logits: Tensor) -> Tensor:
        return self.cases.values[rows]

    def own(self, logits: Tensor) -> Tensor:
        return logits.float()

    def similar(self, rows: Tensor) -> Tensor | float:
        """Added to log s of each neighbour, where they are weighed."""
        return 0.0

    def forward(self, inputs: Tensor, logits: Tensor) -> Tensor:
        rows = self.rows if self.index is None else self.index.search(inputs, K)[1]
        distance = self.distance(inputs, rows)
        kernels = self.kernels[0]
        layer = self.cases.router.layer
        weight, wide, trust = kernels.raw[kernels.place[layer]]
        gamma = self.cases.gamma
        near = -gamma * weight.exp() * distance + self.similar(rows)
        proposal = propose_logits(self.values(rows, logits), near)
        sure = trust.sigmoid() * confidence(-gamma * wide.exp() * distance)
        return mix_logits(self.own(logits), proposal, sure).to(logits.dtype)


class Differences(More):
    """Between the case's logits (0, the paper's) and its change of the router's own (1)."""

    def __init__(self, cases: Cases, kernels: Kernels) -> None:
        super().__init__(cases, kernels)
        self.share = nn.Parameter(torch.zeros((), device=cases.keys.device))
        with torch.no_grad():
            self.before = own_logits(cases.router, cases.keys).float()

    def values(self, rows: Tensor, logits: Tensor) -> Tensor:
        return self.cases.values[rows] + self.share * (logits.float()[:, None] - self.before[rows])


class Scaled(More):
    """Proposals made sharper or duller."""

    def __init__(self, cases: Cases, kernels: Kernels) -> None:
        super().__init__(cases, kernels)
        self.size = nn.Parameter(torch.zeros((), device=cases.keys.device))

    def values(self, rows: Tensor, logits: Tensor) -> Tensor:
        return self.cases.values[rows] * self.size.exp()


class Offset(More):
    """A bias for every expert, on the router's own logits."""

    def __init__(self, cases: Cases, kernels: Kernels) -> None:
        super().__init__(cases, kernels)
        self.bias = nn.Parameter(torch.zeros(cases.values.shape[1], device=cases.keys.device))

    def own(self, logits: Tensor) -> Tensor:
        return logits.float() + self.bias


class Metric(More):
    """A diagonal metric for the distance, among the neighbours that plain distance finds."""

    def __init__(self, cases: Cases, kernels: Kernels) -> None:
        super().__init__(cases, kernels)
        self.scale = nn.Parameter(torch.zeros(cases.keys.shape[1], device=cases.keys.device))

    def distance(self, inputs: Tensor, rows: Tensor) -> Tensor:
        apart = inputs.detach()[:, None].float() - self.cases.keys[rows].float()
        return (apart * self.scale.exp()).square().sum(dim=-1)


class ByChange(More):
    """Cases that the optimisation moved far weigh more, or less."""

    def __init__(self, cases: Cases, kernels: Kernels) -> None:
        super().__init__(cases, kernels)
        self.pull = nn.Parameter(torch.zeros((), device=cases.keys.device))
        with torch.no_grad():
            moved = (cases.values - own_logits(cases.router, cases.keys).float()).norm(dim=-1)
            self.moved = (moved + 1e-6).log() - (moved + 1e-6).log().mean()

    def similar(self, rows: Tensor) -> Tensor:
        return self.pull * self.moved[rows]


USES: dict[str, type[More]] = {
    "kernels alone": More,
    "differences": Differences,
    "scaled proposals": Scaled,
    "expert bias": Offset,
    "diagonal metric": Metric,
    "weighed by change": ByChange,
}


if __name__ == "__main__":
    main()
