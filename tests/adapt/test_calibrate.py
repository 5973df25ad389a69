"""A memory that calibrates itself: it is no judge of itself, and is silent where it is no use."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from knn_moe.adapt.calibrate.splits import own_reference, split
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import QUICK, cases_of, found, loss, memory, model, sayings, study  # noqa: F401
from helpers.zoo import BUILD, encode, family, make_texts
from knn_moe import (
    IndexConfig,
    RoutingConfig,
    RoutingMemory,
    attach,
    build_memory,
    calibrate,
    compress,
    find_routers,
)
from knn_moe.adapt import compress as compression
from knn_moe.adapt.calibrate.fit import (
    Cases,
    Studied,
    fit_widths,
    mixing,
    recalled_loss,
)
from knn_moe.adapt.calibrate.judge import Baseline, judge
from knn_moe.adapt.calibrate.result import Calibration
from knn_moe.adapt.calibrate.values import Learning, learn_values
from knn_moe.adapt.calibrate.widths import WidthParameters
from knn_moe.build.optimise import summed_loss
from knn_moe.config import CalibrationConfig, LayerRouting
from knn_moe.errors import (
    CalibrationError,
    ConfigError,
    MemoryFormatError,
    MemoryMismatchError,
)
from knn_moe.memory.compressed import CompressedLayer
from knn_moe.memory.gamma import Gammas
from knn_moe.recall.neighbours import Widths
from knn_moe.reference.provenance import owners
from knn_moe.routers.own_logits import compute_own_logits


def test_what_is_found_helps_on_text_that_nobody_has_seen(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    found: Calibration,
) -> None:
    fresh = sayings(76)[40:]
    alone = loss(model, tokenizer, fresh)
    with attach(model, memory):
        usual = loss(model, tokenizer, fresh)
    with attach(model, memory, found.routing):
        routed = loss(model, tokenizer, fresh)
    with attach(model, found.apply(memory)):
        calibrated = loss(model, tokenizer, fresh)
    assert found.helps
    assert found.values is not None
    assert max(calibrated, routed) < usual < alone
    assert found.judgement.change.low < calibrated - alone < found.judgement.change.high


def test_it_can_be_had_again(
    model: PreTrainedModel, memory: RoutingMemory, found: Calibration
) -> None:
    again = calibrate(model, memory, config=QUICK)
    assert again.routing == found.routing
    assert again.judgement == found.judgement
    assert all(again.values[layer].equal(values) for layer, values in found.values.items())


def test_the_reference_set_given_is_the_memory_s_own(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    found: Calibration,
) -> None:
    given = calibrate(model, memory, sayings(40), QUICK, tokenizer=tokenizer)
    assert given.routing == found.routing
    with pytest.raises(ConfigError, match="tokenizer="):
        calibrate(model, memory, sayings(40), QUICK)


def test_a_memory_that_misleads_keeps_silent(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, memory: RoutingMemory
) -> None:
    """Values as far on the wrong side of the router's own as they were on the right one."""
    layers = {}
    for router in find_routers(model):
        layer = memory.full_layers()[router.layer]
        own = compute_own_logits(router, layer.keys)
        layers[router.layer] = replace(layer, values=2 * own - layer.values)
    silent = calibrate(model, replace(memory, layers=layers, folder=None), config=QUICK)
    assert not silent.helps
    ids = encode(tokenizer, sayings(50)[-1])
    with torch.no_grad():
        expected = model(ids).logits
        with attach(model, memory, silent.routing) as routing:
            assert torch.equal(model(ids).logits, expected)
    assert routing.stats() == {}


def test_an_example_never_recalls_itself(model: PreTrainedModel, memory: RoutingMemory) -> None:
    owner = owners(memory.provenance)[memory.provenance.window]
    studied = study(model, memory, cases_of(model, memory))
    for layer in studied.neighbours:
        for reading, rows in zip(studied.readings, layer.rows, strict=True):
            real = reading.owner != 0
            assert (owner[rows[real]] != reading.owner[real, None]).all()


def test_twins_are_one_example(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = sayings(40)
    twice = build_memory(model, tokenizer, [*texts, *texts], BUILD)
    assert len(owners(twice.provenance).unique()) == len(set(texts))
    parts = split(own_reference(twice), QUICK)
    fitting, choosing, judging, held_out = (
        set(part.owner[part.windows].tolist()) for part in parts
    )
    assert not fitting & (choosing | judging)
    assert not choosing & judging
    assert held_out == choosing | judging
    assert len(parts.held_out.windows) + len(parts.fitting.windows) == 2 * len(texts)
    assert sum(len(part.windows) for part in parts[:3]) == 2 * len(texts)


def test_too_few_examples_are_refused(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    few = build_memory(model, tokenizer, sayings(5), BUILD)
    with pytest.raises(CalibrationError, match="5 different examples"):
        calibrate(model, few)


def test_what_cannot_be_calibrated(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, memory: RoutingMemory
) -> None:
    with attach(model, memory), pytest.raises(CalibrationError, match="memory attached"):
        calibrate(model, memory, config=QUICK)
    one = build_memory(model, tokenizer, sayings(1), BUILD)
    with pytest.raises(CalibrationError, match="no others to recall"):
        calibrate(model, one, sayings(40), QUICK, tokenizer=tokenizer)
    words = build_memory(model, tokenizer, [str(number) for number in range(3, 40)], BUILD)
    with pytest.raises(CalibrationError, match="Only 0 of the examples"):
        calibrate(model, words, config=QUICK)
    small = replace(memory, layers={0: compress_layer(memory)})
    with pytest.raises(MemoryFormatError, match="no keys to work on"):
        calibrate(model, small, config=QUICK)


def compress_layer(memory: RoutingMemory) -> CompressedLayer:
    layer, routing = memory.full_layers()[0], RoutingConfig(index="fast")  # type: ignore[arg-type]
    return compression.compress_layer(
        layer, Gammas(layer.gamma), Widths(layer.gamma, layer.gamma), routing, torch.device("cpu")
    )


def test_it_works_where_nothing_else_learns(
    model: PreTrainedModel, memory: RoutingMemory, found: Calibration
) -> None:
    with torch.inference_mode():
        assert calibrate(model, memory, config=QUICK).routing == found.routing


def test_only_the_layers_that_the_memory_is_used_on(
    model: PreTrainedModel, memory: RoutingMemory
) -> None:
    manifest = replace(memory.manifest, routing=RoutingConfig(layers=(1,)))
    partly = calibrate(model, replace(memory, manifest=manifest), config=QUICK)
    assert [kernel.layer for kernel in partly.routing.per_layer] == [1]
    assert partly.routing.layers == (1,)


def test_another_model_s_memory_only_by_force(
    model: PreTrainedModel, memory: RoutingMemory, found: Calibration
) -> None:
    manifest = replace(memory.manifest, base_model=replace(memory.base_model, fingerprint="0" * 64))
    foreign = replace(memory, manifest=manifest)
    with pytest.raises(MemoryMismatchError, match="force"):
        calibrate(model, foreign, config=QUICK)
    assert calibrate(model, foreign, config=QUICK, force=True).routing == found.routing


def test_judging_is_what_attaching_does(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """For examples that are not in the memory, where there is nothing to leave out."""
    memory = build_memory(model, tokenizer, make_texts(20), BUILD)
    widths = tuple(
        LayerRouting(layer=layer, gamma_scale=0.5, confidence_scale=0.2, confidence_factor=0.8)
        for layer in memory.layers
    )
    routing = RoutingConfig(k=3, per_layer=widths)
    others = build_memory(model, tokenizer, make_texts(24, seed=1), BUILD)
    readings = list(split(own_reference(others), QUICK).judging.readings(64))
    judged = judge(model, cases_of(model, memory), Baseline.of(model, readings), routing)
    with torch.no_grad(), attach(model, memory, routing) as attached:
        total = sum(float(summed_loss(model, reading.batch)) for reading in readings)
    assert judged.loss == pytest.approx(total / judged.tokens, rel=1e-5)
    for layer, stats in attached.stats().items():
        assert judged.mean_confidence[layer] == pytest.approx(stats.mean_confidence, rel=1e-4)


def test_more_steps_fit_better(model: PreTrainedModel, memory: RoutingMemory) -> None:
    cases = cases_of(model, memory)
    studied = study(model, memory, cases)
    losses = [
        recalled(
            model, cases, studied, fit_widths(model, cases, studied, RoutingConfig(k=4), steps)[0]
        )
        for steps in (8, 32, 96)
    ]
    assert losses == sorted(losses, reverse=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(router.scope._forward_pre_hooks for router in find_routers(model))


def test_changes_are_stretched_where_that_helps(
    model: PreTrainedModel, memory: RoutingMemory
) -> None:
    """A tenth of what the build changed is too little, and is made more; by one number a layer."""
    whole = [each.rescalable() for each in cases_of(model, memory)]
    cases = []
    for each in whole:
        assert each.own is not None
        cases.append(replace(each, values=each.own + 0.1 * (each.values - each.own)))
    studied = study(model, memory, cases)
    widths, rescaled = fit_widths(model, cases, studied, RoutingConfig(k=4), 96)
    as_they_are = [replace(each, own=None) for each in cases]
    plain, same = fit_widths(model, as_they_are, studied, RoutingConfig(k=4), 96)
    better = recalled(model, rescaled, studied, widths)
    assert better < recalled(model, as_they_are, studied, plain)
    for each, after, kept in zip(cases, rescaled, same, strict=True):
        assert kept.values is each.values
        assert each.own is not None
        change = (each.values - each.own).flatten()
        ratio = (after.values - each.own).flatten()[change.abs() > 0.01] / change[
            change.abs() > 0.01
        ]
        assert ratio.mean() > 1.5
        assert after.update_scale == pytest.approx(float(ratio.mean()), rel=1e-3)
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-2, atol=0)


def recalled(
    model: PreTrainedModel, cases: list[Cases], studied: Studied, found: tuple[LayerRouting, ...]
) -> float:
    """The loss of all readings, with these widths and four cases each."""
    widths = WidthParameters(
        {each.router.layer: each.gamma for each in cases}, torch.device("cpu"), found
    )
    with torch.no_grad(), mixing(cases, widths, 4) as mixes:
        places = range(len(studied.readings))
        return sum(float(recalled_loss(model, mixes, studied, place)[0]) for place in places)


def test_values_learn_from_those_who_recall_them(
    model: PreTrainedModel, memory: RoutingMemory
) -> None:
    """Adam's first step is down the others' loss, whose slope is found here by differences; what
    nobody recalls stays."""
    cases = cases_of(model, memory)
    studied = study(model, memory, cases)
    studied = Studied(studied.readings[:1], studied.neighbours)
    widths = tuple(LayerRouting(layer=each.router.layer, confidence_factor=0.9) for each in cases)
    start, rate = RoutingConfig(k=4, per_layer=widths), 1e-3
    _, learned = learn_values(model, cases, studied, start, Learning(1, rate, "sparse"))
    for place, (each, after) in enumerate(zip(cases, learned, strict=True)):
        step = (after.values - each.values) / rate
        recalled_rows = studied.neighbours[place].rows[0].unique()
        unknown = torch.ones(len(step), dtype=torch.bool)
        unknown[recalled_rows] = False
        assert not step[unknown].any()
        slopes = {}
        for row in recalled_rows[:6].tolist():
            losses = []
            for change in (0.1, -0.1):
                values = each.values.clone()
                values[row, 0] += change
                moved = [*cases]
                moved[place] = replace(each, values=values)
                losses.append(recalled(model, moved, studied, widths))
            slopes[row] = losses[0] - losses[1]
        row = max(slopes, key=lambda row: abs(slopes[row]))
        assert step[row, 0].item() == pytest.approx(-math.copysign(1, slopes[row]), rel=1e-2)
    assert cases[0].values.equal(memory.full_layers()[0].values)


def test_values_learn_through_all_experts(tokenizer: PreTrainedTokenizerFast) -> None:
    """Where chosen experts' weights sum to one, the sparse slope of all other logits is nothing."""
    model = family("qwen3_moe")
    memory = build_memory(model, tokenizer, make_texts(30), BUILD)
    cases = cases_of(model, memory)
    studied = study(model, memory, cases)
    widths = tuple(LayerRouting(layer=each.router.layer, confidence_factor=0.9) for each in cases)
    start = RoutingConfig(k=4, per_layer=widths)
    before = recalled(model, cases, studied, widths)
    moved = {}
    for gradient in ("sparse", "dense"):
        _, learned = learn_values(model, cases, studied, start, Learning(1, 0.02, gradient))
        assert recalled(model, learned, studied, widths) < before
        moved[gradient] = float((learned[-1].values != cases[-1].values).float().mean())
    assert moved["sparse"] < 0.95 * moved["dense"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("neighbours", ()),
        ("neighbours", (0,)),
        ("held_out", 0.5),
        ("value_rates", (0.0,)),
        ("passes", 0),
        ("fit_tokens", 0),
        ("judge_tokens", 0),
        ("steps", 0),
        ("step_tokens", 0),
    ],
)
def test_bad_settings(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        CalibrationConfig(**{field: value})  # type: ignore[arg-type]


def test_compressing_keeps_it_and_merging_forgets_what_it_was_worth(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    found: Calibration,
    tmp_path: Path,
) -> None:
    calibrated = found.apply(memory)
    small = compress(calibrated, "fast", tmp_path / "small")
    assert small.routing == replace(found.routing, index=IndexConfig(kind="fast"))
    assert small.manifest.calibration == found.report()
    ids = torch.arange(3, 60)[None]
    seen = []
    for each in (calibrated, small):
        with torch.no_grad(), attach(model, each) as routing:
            model(ids)
        seen.append([layer.mean_confidence for layer in routing.stats().values()])
    assert seen[1] == pytest.approx(seen[0], abs=0.05)
    for examples in (None, sayings(40)):
        with pytest.raises(CalibrationError, match="were fitted to its own examples"):
            calibrate(model, calibrated, examples, QUICK, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="those to drop included"):
        calibrated.without([0])
    merged = memory.merge(calibrated)
    assert merged.manifest.learned
    assert merged.routing == memory.build.routing()
    assert merged.manifest.calibration is None
