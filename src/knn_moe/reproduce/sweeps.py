"""Tables that vary one parameter of kNN-MoE (§6.2 to §6.4, appendix C.3, C.4 and D)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import mean, stdev
from typing import Any, Final

import torch

from knn_moe.build.build import build_memory
from knn_moe.config import PRESETS, RoutingConfig
from knn_moe.evaluation.compare import compare_runs, summarise
from knn_moe.evaluation.evaluate import prepare_questions
from knn_moe.evaluation.store import Run
from knn_moe.inference.attach import attach
from knn_moe.inference.expert_usage import similarity_share
from knn_moe.methods import METHODS, KnnMoe, Method, PreparedMethod
from knn_moe.methods.knn_moe import routing_memory
from knn_moe.reproduce.results import (
    BASE,
    CHANCE,
    KNN,
    MARKS,
    accuracy_cell,
    left_out,
    nats_cell,
)
from knn_moe.reproduce.study import Study
from knn_moe.reproduce.table import (
    Cell,
    Chart,
    Series,
    Table,
    make_row,
    no_value,
    number,
    percent,
    unparsed,
    values_of,
)
from knn_moe.tasks.task import TEXT

NEIGHBOURS: Final = (1, 3, 5, 10)
STEPS: Final = (1, 3, 10)
SIMILARITIES: Final = {"rbf": "RBF", "rbf-unit": "RBF + L2 Norm", "cosine": "Cosine"}
SEEDS: Final = 3
TUNED: Final = ("sft", "sft-router")
SHARE_OF: Final = 5  # neighbours, in the share of the nearest

RunOf = Callable[[str, str, str], Run]  # (model, task, preset) → the run with one value


def reference_size(study: Study) -> Table:
    """Make Table 4: more reference text."""
    shares = (0.0, *study.plan.sizes)

    def at(share: float) -> RunOf:
        return lambda model, task, preset: run_with_share(study, model, task, preset, share)

    return _sweep(
        study,
        ("reference-size", "Reference set size", "reference"),
        {f"{share:.0%}": at(share) for share in shares},
    )


def run_with_share(study: Study, model: str, task: str, preset: str, share: float) -> Run:
    """Run kNN-MoE with a share of the reference set; without any of it, zero-shot."""
    if share == 0:
        return study.run(model, task, BASE)
    if share == 1:
        return _run_unchanged(study, model, task, preset)

    def make() -> KnnMoe:
        return KnnMoe(routing_memory(study.context(model, task, share), preset))

    return study.run_variant(model, task, f"knn-{preset}-{share:g}", make)


def _run_unchanged(study: Study, model: str, task: str, preset: str) -> Run:
    """Return the run with the whole reference set, which the main table has as well."""
    return study.run(model, task, KNN if preset == study.plan.preset else f"knn-{preset}")


def _make_knn(study: Study, model: str, task: str, preset: str, **changes: Any) -> KnnMoe:
    memory = routing_memory(study.context(model, task), preset)
    return KnnMoe(memory, replace(memory.routing, **changes))


def neighbours(study: Study) -> Table:
    """Make Table 5: more neighbours."""
    return _sweep(
        study,
        ("neighbours", "Number of neighbours", "K"),
        {str(k): _with_routing(study, f"k-{k}", k=k) for k in NEIGHBOURS},
    )


def similarity(study: Study) -> Table:
    """Make Table 12: other similarities."""
    return _sweep(
        study,
        ("similarity", "Similarity functions", "similarity"),
        {
            title: _with_routing(study, f"similarity-{name}", similarity=name)
            for name, title in SIMILARITIES.items()
        },
    )


def _with_routing(study: Study, name: str, **changes: Any) -> RunOf:
    """Return what runs the same memory with another routing config."""

    def run(model: str, task: str, preset: str) -> Run:
        usual = RoutingConfig(**PRESETS[preset]["routing"])
        if replace(usual, **changes) == usual:
            return _run_unchanged(study, model, task, preset)
        make = partial(_make_knn, study, model, task, preset, **changes)
        return study.run_variant(model, task, f"knn-{preset}-{name}", make)

    return run


def steps(study: Study) -> Table:
    """Make Table 6: more steps of gradient descent."""

    def at(count: int) -> RunOf:
        def run(model: str, task: str, preset: str) -> Run:
            def make() -> KnnMoe:
                context = study.context(model, task, study.plan.steps_share)
                config = context.build_config(preset=preset, steps=count)
                examples = context.examples
                return KnnMoe(build_memory(context.model, context.tokenizer, examples, config))

            return study.run_variant(model, task, f"knn-{preset}-steps-{count}", make)

        return run

    table = _sweep(study, ("steps", "Gradient descent steps", "S"), {str(s): at(s) for s in STEPS})
    note = f"With {study.plan.steps_share:.0%} of the reference rows that are stated below."
    return replace(table, notes=(*table.notes, note))


def _sweep(study: Study, names: tuple[str, str, str], runs: Mapping[str, RunOf]) -> Table:
    """Return a table with a row for each value and a column for each model and preset.

    Args:
        names: Of the table, its title, and of what is varied.
        runs: What runs kNN-MoE with each value.
    """
    name, title, varied = names
    plan = study.plan
    pairs = [(model, preset) for model in plan.models for preset in plan.presets]
    rows, charts = [], []
    for task in plan.swept:
        found: dict[str, list[Cell]] = {label: [] for label in runs}
        chances = []
        for model, preset in pairs:
            base = study.run(model, task, BASE)
            chances.append(percent(summarise(base).chance))
            for label, run in runs.items():
                found[label].append(_compare(run(model, task, preset), base))
        if not study.is_text(task):
            rows.append(make_row(study.title(task), CHANCE, *chances))
        for label, cells in found.items():
            rows.append(make_row(study.title(task), label, *cells))
        series = tuple(
            Series(f"{model}, {preset}", tuple(found[label][place].value for label in runs))
            for place, (model, preset) in enumerate(pairs)
        )
        axis = "nats per token over zero-shot" if study.is_text(task) else "accuracy (%)"
        charts.append(Chart("lines", tuple(runs), series, axis, study.title(task)))
    return Table(
        name=name,
        title=title,
        columns=("benchmark", varied, *(f"{model}, {preset}" for model, preset in pairs)),
        rows=tuple(rows),
        notes=(
            "Accuracy in % for questions; for text, the change of the loss per token against "
            f"zero-shot, in nats: lower is better. {MARKS}",
        ),
        charts=tuple(charts),
        facts=study.facts(plan.swept),
    )


def _compare(run: Run, base: Run) -> Cell:
    unchanged = run.method == base.method
    line = summarise(base) if unchanged else compare_runs([base, run], base.method)[1]
    if line.scoring != TEXT:
        return accuracy_cell(line)
    return number(0.0, "+.3f") if unchanged else nats_cell(line)


def top1_share(study: Study) -> Table:
    """Make Table 13: the share of the nearest in the similarity of five neighbours."""
    plan = study.plan
    pairs = [(model, preset) for model in plan.models for preset in plan.presets]
    found: dict[str, list[Cell]] = {task: [] for task in plan.tasks}
    for model, preset in pairs:
        for task in plan.tasks:
            measure = partial(_measure_share, study, model, task, preset)
            share = study.measure(model, task, f"top1-share-{preset}", measure)
            found[task].append(number(share, ".2f"))
    series = tuple(
        Series(f"{model}, {preset}", values_of([found[task][place] for task in plan.tasks]))
        for place, (model, preset) in enumerate(pairs)
    )
    heads = tuple(study.title(task) for task in plan.tasks)
    return Table(
        name="top1-share",
        title="Share of the nearest neighbour",
        columns=("benchmark", *(f"{model}, {preset}" for model, preset in pairs)),
        rows=tuple(make_row(study.title(task), *cells) for task, cells in found.items()),
        notes=(f"s₁ / Σ s over K = {SHARE_OF} neighbours, averaged over test tokens and layers.",),
        charts=(Chart("bars", heads, series, "share of the nearest"),),
        facts=study.facts(plan.tasks),
    )


def _measure_share(study: Study, model: str, task: str, preset: str) -> float:
    context = study.context(model, task)
    memory = routing_memory(context, preset)
    asked = prepare_questions(context.tokenizer, study.data(task), study.eval_config(task))
    total = weight = 0.0
    with attach(context.model, memory, replace(memory.routing, k=SHARE_OF)) as routing:
        for question in asked.questions:
            part = similarity_share(context.model, routing, torch.tensor([question.ids]))
            total += part.overall * part.tokens
            weight += part.tokens
    return total / weight


def seeds(study: Study) -> Table:
    """Make Table 14: fine-tuning with several seeds."""
    plan = study.plan
    model, used = plan.models[0], [plan.seed + more for more in range(SEEDS)]
    methods = {name: METHODS[name].title for name in TUNED if METHODS[name].installed}
    rows = []
    found: dict[str, list[float]] = {title: [] for title in methods.values()}
    for task in plan.seeded:
        cells, chance = [], no_value()
        for method, title in methods.items():
            lines = [summarise(_run_with_seed(study, model, task, method, seed)) for seed in used]
            scores = [100 * line.score.mean for line in lines]
            found[title].append(mean(scores))
            without = unparsed(mean(line.unparsed_share or 0 for line in lines))
            text = f"{mean(scores):.2f}±{stdev(scores):.2f}{without}"
            cells.append(Cell(text, mean(scores)))
            chance = percent(lines[0].chance)
        rows.append(make_row(model, study.title(task), chance, *cells))
    heads = tuple(study.title(task) for task in plan.seeded)
    series = tuple(Series(title, tuple(scores)) for title, scores in found.items())
    return Table(
        name="seeds",
        title="Random seeds",
        columns=("model", "benchmark", CHANCE, *methods.values()),
        rows=tuple(rows),
        notes=(
            f"Accuracy in %, mean ± standard deviation over seeds {', '.join(map(str, used))}, "
            "which determine the validation split, the order and the adapters, at the learning "
            "rate that was chosen with the first. Zero-shot and kNN-MoE do not depend on a seed.",
            *left_out(TUNED),
        ),
        charts=(Chart("bars", heads, series, "accuracy (%)", model),),
        facts=study.facts(plan.seeded),
    )


def _run_with_seed(study: Study, model: str, task: str, method: str, seed: int) -> Run:
    first = study.run(model, task, method)
    if seed == study.plan.seed:
        return first
    rate = first.facts["method_facts"]["learning_rate"]
    make = partial(_tune, study, model, task, method, seed, rate)
    return study.run_variant(model, task, f"{method}-seed-{seed}", make)


def _tune(
    study: Study, model: str, task: str, method: str, seed: int, rate: float
) -> Method | PreparedMethod:
    from knn_moe.methods.sft import prepare_router_sft, prepare_sft
    from knn_moe.methods.training_loop import TuneConfig

    config = TuneConfig(seed=seed, learning_rates=(rate,))
    prepare = prepare_sft if method == "sft" else prepare_router_sft
    return prepare(study.context(model, task), config)
