"""Ideas to make a memory better, each measured alone: docs/research.md has what came of them.

    python models/ideas.py tiny-olmoe tiny-qwen3 OUT/olmoe-80m --out docs/measurements/ideas

One strong memory of medical text for each model. Ideas about *targets* give its cases other values;
ideas about *use* give the mixing more to fit. Whatever the idea, the widths of every layer are
fitted for it by leave-one-example-out (K = 16), and it is tried on a slice of the training text
that no memory holds: the test split takes no part in what is kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corpus import encode, read_texts, sample_texts, windows
from ideas_targets import TARGETS, Step, descend, own_losses
from ideas_uses import USES, K, More
from ideas_values import LEARNINGS, learn
from knn_moe import RoutingConfig, attach, find_routers
from knn_moe.adapt.calibrate.fit import Cases, find_neighbours, fit_widths, recalled_loss
from knn_moe.adapt.calibrate.splits import Slice, own_reference
from knn_moe.adapt.calibrate.widths import WidthParameters
from knn_moe.index.exact import ExactIndex
from knn_moe.memory.memory import RoutingMemory
from knn_moe.methods.knn_lm import KnnLmConfig, KnnLmHead, Neighbours, Store, choose
from knn_moe.reference.provenance import owners
from knn_moe.reference.windows import make_batch, plan_batches
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import freeze, install_hooks
from knn_moe.tasks.likelihood import TokenLosses, token_losses
from measure import LENGTH, Bench, common_parser, compare

MOST = max(how.k for how in LEARNINGS.values())
FIT_STEPS = 96
HEAD = "kNN-LM on the last router's keys"
KINDS = ("values", "use", "head", "targets")


def main() -> None:
    parser = common_parser((__doc__ or "").splitlines()[0], windows=100)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS, help="of ideas")
    parser.add_argument("--rate", type=float, default=2.0, help="η of the memory")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        bench = Bench.load(name, options.data, options.device)
        rows = []
        with use_grouped_experts(bench.model):
            for row in study(bench, options):
                rows.append(row)
                print(Path(name).name, row, flush=True)
                asked = {each: getattr(options, each) for each in ("sequences", "windows", "rate")}
                found = {"model": Path(name).name, **asked, "rows": rows}
                text = json.dumps(found, indent=1)
                (options.out / f"{Path(name).name}.json").write_text(f"{text}\n", encoding="utf8")


def study(bench: Bench, options: Any) -> Iterator[dict[str, Any]]:
    """One row for each idea."""
    tokens = options.sequences * LENGTH
    texts = read_texts(bench.data, "medical", "train")
    held = sample_texts(bench.tokenizer, texts, options.windows * LENGTH, skip=tokens)
    trial = windows(encode(bench.tokenizer, held), LENGTH).long()
    alone = bench.losses(trial)
    memory = bench.build("medical", "strong", options.sequences, learning_rate=options.rate)
    yield {"idea": "strong", "kind": "as it is", **compare(bench.losses(trial, memory), alone)}
    work = Work(bench, memory)

    widths, _ = fit_widths(bench.model, work.cases, work.studied, RoutingConfig(k=K), FIT_STEPS)

    def row(name: str, kind: str, started: float, found: TokenLosses) -> dict[str, Any]:
        seconds = round(time.perf_counter() - started, 1)
        return {"idea": name, "kind": kind, "seconds": seconds, **compare(found, alone)}

    for name, how in LEARNINGS.items():
        if "values" in options.kinds:
            started = time.perf_counter()
            start = (widths, work.cases)
            if how.rescaled:
                longer = [each.rescalable() for each in work.cases]
                start = fit_widths(bench.model, longer, work.studied, RoutingConfig(k=K), FIT_STEPS)
            learned, cases = learn(bench.model, start, work.studied, how)
            found = work.losses(trial, cases, RoutingConfig(k=how.k, per_layer=learned))
            yield row(name, "values", started, found)
    for name, more in USES.items():
        if "use" in options.kinds:
            started = time.perf_counter()
            yield row(name, "use", started, work.tried(trial, work.fit(more)))
    if "head" in options.kinds:
        started = time.perf_counter()
        yield row(HEAD, "head", started, work.with_head(trial))
    for name, step in TARGETS.items():
        if "targets" in options.kinds:
            started = time.perf_counter()
            cases = work.with_targets(step)
            fitted, _ = fit_widths(bench.model, cases, work.studied, RoutingConfig(k=K), FIT_STEPS)
            found = work.losses(trial, cases, RoutingConfig(k=K, per_layer=fitted))
            yield row(name, "targets", started, found)


class Work:
    """A memory taken apart: its reference tokens, its cases, and each token's neighbours."""

    def __init__(self, bench: Bench, memory: RoutingMemory) -> None:
        self.bench = bench
        self.memory = memory
        self.reference = own_reference(memory)
        owner = owners(memory.provenance)
        layers = memory.full_layers()
        where = memory.provenance
        self.cases = [
            Cases.of(router, layers[router.layer], owner[where.window], where)
            for router in find_routers(bench.model)
        ]
        part = Slice(self.reference, list(range(len(owner))), owner)
        size = min(bench.batch_tokens, max(len(memory) // 24, 64))
        readings = list(part.readings(size))
        self.studied = find_neighbours(bench.model, self.cases, readings, MOST)

    def with_targets(self, step: Step) -> list[Cases]:
        """The same keys, with values that another way of descending found."""
        values = [torch.empty_like(each.values) for each in self.cases]
        device = self.bench.model.device
        with freeze(self.bench.model):
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
            layers[each.router.layer] = replace(
                layer, keys=each.keys.cpu(), values=each.values.cpu()
            )
        memory = replace(self.memory, layers=layers, folder=None)
        with attach(self.bench.model, memory, config):
            return token_losses(self.bench.model, trial, max(self.bench.batch_tokens // LENGTH, 1))

    def fit(self, more: type[More]) -> list[More]:
        """WidthParameters and what the idea adds, fitted together."""
        model, device = self.bench.model, self.bench.model.device
        widths = WidthParameters({each.router.layer: each.gamma for each in self.cases}, device)
        mixing = [more(each, widths) for each in self.cases]
        added = [weight for one in mixing for weight in one.parameters()]
        rates = (0.1, more.rate) if added else (0.1,)
        groups = [{"params": part} for part in (list(widths.parameters()), added) if part]
        adam = torch.optim.Adam(groups, lr=0.1)
        chance = torch.Generator().manual_seed(0)
        count = len(self.studied.readings)
        order = torch.cat([torch.randperm(count, generator=chance) for _ in range(FIT_STEPS)])
        hooks = [RouterHook(one.cases.router, one) for one in mixing]
        with freeze(model), torch.enable_grad(), install_hooks(hooks):
            for step, place in enumerate(order[:FIT_STEPS].tolist()):
                summed, scored = recalled_loss(model, mixing, self.studied, place)  # type: ignore[arg-type]
                adam.zero_grad()
                (summed / scored).backward()
                for group, most in zip(adam.param_groups, rates, strict=True):
                    group["lr"] = most * (1 - step / FIT_STEPS)
                adam.step()
        return mixing

    @torch.no_grad()
    def tried(self, trial: Tensor, mixing: Sequence[More]) -> TokenLosses:
        """Every search afresh."""
        for one in mixing:
            one.searched()
        with install_hooks([RouterHook(one.cases.router, one) for one in mixing]):
            return token_losses(self.bench.model, trial, max(self.bench.batch_tokens // LENGTH, 1))

    def with_head(self, trial: Tensor) -> TokenLosses:
        """The model without the memory, and a kNN-LM head that takes the last layer's keys for its
        own, chosen as kNN-LM's own are (methods/knn_lm.py)."""
        last = self.cases[-1]
        reading = self.reference
        scored = reading.scored.nonzero().flatten()
        source = replace(reading.provenance, key=scored)
        row_of = reading.kept.cumsum(0) - 1
        device = last.keys.device
        keys = last.keys[row_of[scored].to(device)]
        values = source.stream[scored + 1].long().to(device)
        own = -self._own().to(device)
        config, _ = choose(Store(keys, values, own, source.example.to(device)), KnnLmConfig(), 0)
        head = KnnLmHead(Neighbours(ExactIndex(keys), values), config)
        model = self.bench.model
        seen: list[Tensor] = []

        def see(inputs: Tensor, logits: Tensor) -> Tensor:
            seen.append(inputs.detach())
            return logits

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            hidden = seen.pop().view(*output.logits.shape[:-1], -1)
            output.logits = head.mixed(hidden, output.logits)
            return output

        handle = model.register_forward_hook(after)
        try:
            with install_hooks([RouterHook(last.router, see)]):
                return token_losses(model, trial, max(self.bench.batch_tokens // LENGTH, 1))
        finally:
            handle.remove()

    @torch.no_grad()
    def _own(self) -> Tensor:
        """What the model alone loses on each scored token of the reference [S]."""
        losses = torch.empty(len(self.reference.scored))
        begin = self.reference.provenance.begin
        for numbers in plan_batches(self.reference.lengths, self.bench.batch_tokens):
            batch, _ = make_batch(self.reference, numbers)
            own = own_losses(self.bench.model, batch.to(self.bench.model.device))
            own = own.view(batch.ids.shape).cpu()
            for line, number in enumerate(numbers):
                start, stop = begin[number : number + 2].tolist()
                losses[start:stop] = own[line, : stop - start]
        return losses[self.reference.scored]


if __name__ == "__main__":
    main()
