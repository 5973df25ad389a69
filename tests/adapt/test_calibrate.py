"""Calibration: it never judges by what it was fitted to, and turns a useless memory off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import QUICK, look_up, mean_loss, open_cases, sayings
from helpers.zoo import BUILD, encode, make_texts
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
from knn_moe.adapt.calibrate.judge import Baseline, judge
from knn_moe.adapt.calibrate.result import Calibration
from knn_moe.adapt.calibrate.values import train_values
from knn_moe.adapt.calibrate.widths import DivergedError
from knn_moe.build.optimise import summed_loss
from knn_moe.config import CalibrationConfig, LayerRouting
from knn_moe.errors import (
    AttachError,
    CalibrationError,
    ConfigError,
    MemoryFormatError,
    MemoryMismatchError,
)
from knn_moe.reference.provenance import owners
from knn_moe.reference.splits import split
from knn_moe.routers.own_logits import compute_own_logits
from knn_moe.support.progress import Progress


@pytest.mark.slow
def test_it_helps_on_unseen_text(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    sayings_memory: RoutingMemory,
    calibration: Calibration,
) -> None:
    unseen = sayings(76)[40:]
    alone = mean_loss(olmoe, zoo_tokenizer, unseen)
    with attach(olmoe, sayings_memory):
        uncalibrated = mean_loss(olmoe, zoo_tokenizer, unseen)
    with attach(olmoe, sayings_memory, calibration.routing):
        routed = mean_loss(olmoe, zoo_tokenizer, unseen)
    with attach(olmoe, calibration.apply(sayings_memory)):
        calibrated = mean_loss(olmoe, zoo_tokenizer, unseen)
    assert calibration.helps
    assert calibration.values is not None
    assert max(calibrated, routed) < uncalibrated < alone
    change = calibration.judgement.change
    assert change.low < calibrated - alone < change.high


@pytest.mark.slow
def test_it_is_deterministic_also_in_inference_mode_and_with_the_examples_given(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    sayings_memory: RoutingMemory,
    calibration: Calibration,
) -> None:
    with torch.inference_mode():
        again = calibrate(olmoe, sayings_memory, sayings(40), QUICK, tokenizer=zoo_tokenizer)
    assert again.routing == calibration.routing
    assert again.judgement == calibration.judgement
    assert all(again.values[layer].equal(values) for layer, values in calibration.values.items())
    with pytest.raises(ConfigError, match="tokenizer="):
        calibrate(olmoe, sayings_memory, sayings(40), QUICK)


@pytest.mark.slow
def test_a_memory_that_misleads_is_turned_off(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, sayings_memory: RoutingMemory
) -> None:
    """Values are as far on the wrong side of the router's own as they were on the right one."""
    layers = {}
    for router in find_routers(olmoe):
        layer = sayings_memory.full_layers()[router.layer]
        own = compute_own_logits(router, layer.keys)
        layers[router.layer] = replace(layer, values=2 * own - layer.values)
    misleading = replace(sayings_memory, layers=layers, folder=None)
    off = calibrate(olmoe, misleading, config=replace(QUICK, value_rates=()))
    assert not off.helps
    ids = encode(zoo_tokenizer, sayings(50)[-1])
    with torch.no_grad():
        expected = olmoe(ids).logits
        with attach(olmoe, sayings_memory, off.routing) as routing:
            assert torch.equal(olmoe(ids).logits, expected)
    assert routing.stats() == {}


def test_an_example_never_recalls_itself(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    owner = owners(sayings_memory.provenance)[sayings_memory.provenance.window]
    data = look_up(olmoe, sayings_memory, open_cases(olmoe, sayings_memory))
    for table in data.tables:
        for batch, rows in zip(data.batches, table.rows, strict=True):
            real = batch.token_owner != 0
            assert (owner[rows[real]] != batch.token_owner[real, None]).all()


def test_identical_examples_are_in_one_part(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = sayings(40)
    twice = build_memory(olmoe, zoo_tokenizer, [*texts, *texts], BUILD)
    assert len(owners(twice.provenance).unique()) == len(set(texts))
    parts = split(twice.reference_tokens(), QUICK)
    fit_part, choose, judge_part, held_out = (
        set(part.reference.owners[part.windows].tolist()) for part in parts[:4]
    )
    assert not fit_part & (choose | judge_part)
    assert not choose & judge_part
    assert held_out == choose | judge_part
    assert len(parts.held_out.windows) + len(parts.fit.windows) == 2 * len(texts)
    assert sum(len(part.windows) for part in parts[:3]) == 2 * len(texts)


def test_what_cannot_be_calibrated(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    sayings_memory: RoutingMemory,
    tmp_path: Path,
) -> None:
    with attach(olmoe, sayings_memory), pytest.raises(AttachError, match="memory attached"):
        calibrate(olmoe, sayings_memory, config=QUICK)
    with pytest.raises(AttachError, match="The model comes first"):
        calibrate(sayings_memory, olmoe)  # type: ignore[arg-type]  # in the wrong order
    few = build_memory(olmoe, zoo_tokenizer, sayings(5), BUILD)
    with pytest.raises(CalibrationError, match="there are 5"):
        calibrate(olmoe, few)
    one = build_memory(olmoe, zoo_tokenizer, sayings(1), BUILD)
    with pytest.raises(CalibrationError, match="no others to recall"):
        calibrate(olmoe, one, sayings(40), QUICK, tokenizer=zoo_tokenizer)
    words = build_memory(olmoe, zoo_tokenizer, [str(number) for number in range(3, 40)], BUILD)
    with pytest.raises(CalibrationError, match="6 examples with a token to predict, and one has 0"):
        calibrate(olmoe, words, config=QUICK)
    with pytest.raises(MemoryFormatError, match="has no keys"):
        calibrate(olmoe, compress(sayings_memory, "fast", tmp_path / "small"), config=QUICK)
    manifest = replace(
        sayings_memory.manifest,
        base_model=replace(sayings_memory.base_model, fingerprint="0" * 64),
    )
    with pytest.raises(MemoryMismatchError, match="force"):
        calibrate(olmoe, replace(sayings_memory, manifest=manifest), config=QUICK)
    random = replace(sayings_memory.manifest, random_seed=0)
    with pytest.raises(CalibrationError, match="recalls cases at random"):
        calibrate(olmoe, replace(sayings_memory, manifest=random), config=QUICK)


@pytest.mark.slow
def test_only_the_layers_that_the_memory_is_used_on_by_force_for_another_model(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    manifest = replace(
        sayings_memory.manifest,
        routing=RoutingConfig(layers=(1,)),
        base_model=replace(sayings_memory.base_model, fingerprint="0" * 64),
    )
    partly = calibrate(olmoe, replace(sayings_memory, manifest=manifest), config=QUICK, force=True)
    assert [one.layer for one in partly.routing.per_layer] == [1]
    assert partly.routing.layers == (1,)


@pytest.mark.parametrize("sparing", [False, True])
def test_judging_is_what_attaching_does(
    sparing: bool, olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    """For examples that are not in the memory, where there is nothing to leave out."""
    memory = build_memory(olmoe, zoo_tokenizer, make_texts(20), BUILD)
    widths = tuple(
        LayerRouting(layer=layer, gamma_scale=0.5, confidence_scale=0.2, confidence_factor=0.8)
        for layer in memory.layers
    )
    routing = RoutingConfig(k=3, per_layer=widths, spare_first_token=sparing)
    others = build_memory(olmoe, zoo_tokenizer, make_texts(24, seed=1), BUILD)
    batches = list(split(others.reference_tokens(), QUICK).judge.batches(64))
    judged = judge(olmoe, open_cases(olmoe, memory), Baseline.of(olmoe, batches), routing)
    with torch.no_grad(), attach(olmoe, memory, routing) as attached:
        total = sum(float(summed_loss(olmoe, batch)) for batch in batches)
    assert judged.loss == pytest.approx(total / judged.tokens, rel=1e-5)
    for layer, stats in attached.stats().items():
        assert judged.mean_confidence[layer] == pytest.approx(stats.mean_confidence, rel=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("neighbours", ()),
        ("neighbours", (0,)),
        ("held_out", 0.5),
        ("value_rates", (0.0,)),
        ("passes", 0),
        ("step_tokens", 0),
    ],
)
def test_a_config_out_of_range(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        CalibrationConfig(**{field: value})  # type: ignore[arg-type]


def test_compressing_keeps_a_calibration_and_merging_forgets_it(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    sayings_memory: RoutingMemory,
    calibration: Calibration,
    tmp_path: Path,
) -> None:
    calibrated = calibration.apply(sayings_memory)
    small = compress(calibrated, "fast", tmp_path / "small")
    assert small.routing == replace(calibration.routing, index=IndexConfig(kind="fast"))
    assert small.manifest.calibration == calibration.report()
    ids = torch.arange(3, 60)[None]
    confidences = []
    for each in (calibrated, small):
        with torch.no_grad(), attach(olmoe, each) as routing:
            olmoe(ids)
        confidences.append([layer.mean_confidence for layer in routing.stats().values()])
    assert confidences[1] == pytest.approx(confidences[0], abs=0.05)
    for examples in (None, sayings(40)):
        with pytest.raises(CalibrationError, match="trained on its own examples"):
            calibrate(olmoe, calibrated, examples, QUICK, tokenizer=zoo_tokenizer)
    with pytest.raises(ConfigError, match="those to drop included"):
        calibrated.without([0])
    merged = sayings_memory.merge(calibrated)
    assert merged.manifest.values_trained
    assert merged.routing == replace(sayings_memory.build.routing(), spare_first_token=True)
    assert merged.manifest.calibration is None


def test_distances_are_those_of_the_neighbours_recalled(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory, calibration: Calibration
) -> None:
    cases = open_cases(olmoe, sayings_memory)
    data = look_up(olmoe, sayings_memory, cases)
    for each, table in zip(cases, data.tables, strict=True):
        one = calibration.distances[each.router.layer]
        assert one.nearest == pytest.approx(table.mean_distance(0), rel=1e-3)
        last = table.mean_distance(calibration.routing.k - 1)
        assert one.last == pytest.approx(last, rel=1e-3)
        assert 0 < one.nearest <= one.last


def test_diverging_trials_are_left_out(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*args: Any, **kwargs: Any) -> None:
        raise DivergedError

    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.train_values", diverge)
    kept = calibrate(olmoe, sayings_memory, config=QUICK)
    names = [trial.name for trial in kept.trials if "λ by" not in trial.name]
    assert names == ["widths, K = 4", "widths, K = 1", "unchanged"]
    assert kept.chosen.startswith("widths, K = 4")
    assert not kept.values_trained
    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.fit_widths", diverge)
    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.judge", diverge)
    with pytest.raises(CalibrationError, match="finite loss"):
        calibrate(olmoe, sayings_memory, config=QUICK)


def test_values_that_are_not_finite(olmoe: PreTrainedModel, sayings_memory: RoutingMemory) -> None:
    layers = {
        index: replace(layer, values=layer.values * float("nan"))
        for index, layer in sayings_memory.full_layers().items()
    }
    with pytest.raises(CalibrationError, match="finite loss"):
        calibrate(olmoe, replace(sayings_memory, layers=layers, folder=None), config=QUICK)


@pytest.mark.slow
def test_values_may_stay(olmoe: PreTrainedModel, sayings_memory: RoutingMemory) -> None:
    kept = calibrate(olmoe, sayings_memory, config=replace(QUICK, value_rates=()))
    assert kept.helps
    assert kept.values is None
    assert set(kept.update_scale.values()) == {1.0}
    used = kept.apply(sayings_memory)
    assert not used.manifest.values_trained
    # The routing it has now was chosen by examples that may judge this time: it is not tried.
    again = calibrate(olmoe, used, config=replace(QUICK, value_rates=(), seed=1))
    names = [trial.name for trial in again.trials if "λ by" not in trial.name]
    assert names == ["widths, K = 4", "widths, K = 1"]


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["sparse", "dense"])
def test_values_are_trained_by_the_build_s_gradient_and_every_step_is_reported(
    gradient: str,
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[str] = []
    steps: list[Progress] = []

    def watch(*args: Any, **kwargs: Any) -> Any:
        used.append(args[4].gradient)
        return train_values(*args, **kwargs)

    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.train_values", watch)
    config = replace(BUILD, gradient=gradient, steps=5, learning_rate=20.0)
    memory = build_memory(olmoe, zoo_tokenizer, sayings(40), config)
    found = calibrate(olmoe, memory, config=QUICK, on_progress=steps.append)
    assert set(used) == {gradient}
    # For two numbers of neighbours, then on all examples; once where that gained nothing.
    assert len(used) == (3 if found.values_trained else 1)
    assert (steps[-1].done == steps[-1].total) == found.values_trained
    assert found.values_trained or gradient == "sparse"
    assert found.report()["update_scale"].keys() == {"0", "1"}
