"""The reach of a calibrated memory: no wider than its gain needs, so that other text is spared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import QUICK, mean_loss, sayings
from knn_moe import RoutingConfig, RoutingMemory, attach
from knn_moe.adapt.calibrate.search import Search
from knn_moe.adapt.calibrate.trials import Calibrator, Trial
from knn_moe.config import LayerRouting
from knn_moe.support.progress import ignore_progress


@pytest.fixture(scope="module")
def searched(olmoe: PreTrainedModel, sayings_memory: RoutingMemory) -> tuple[Search, Trial]:
    """A whole search, and its best trial with the reach that was fitted."""
    reference = sayings_memory.reference_tokens()
    search = Search(Calibrator(olmoe, sayings_memory, reference, QUICK, ignore_progress))
    search.run()
    best = search.best
    assert best.narrowing > 1
    fitted = search.calibrator.try_narrower(best, 1 / best.narrowing)
    assert fitted is not None
    return search, fitted


@pytest.mark.slow
def test_the_reach_is_as_narrow_as_keeps_the_gain(searched: tuple[Search, Trial]) -> None:
    search, fitted = searched
    best = search.best
    share = best.judgement.change.difference / fitted.judgement.change.difference
    assert share >= 0.95
    next_one = search.calibrator.try_narrower(fitted, 2 * best.narrowing)
    assert next_one is not None
    lost = next_one.judgement.change.difference / fitted.judgement.change.difference
    assert lost < 0.95 or best.narrowing == 64
    for ours, theirs in zip(best.routing.per_layer, fitted.routing.per_layer, strict=True):
        scale = theirs.confidence_scale * best.narrowing
        assert ours.confidence_scale == pytest.approx(scale)
        assert ours.gamma_scale == theirs.gamma_scale


@pytest.mark.slow
def test_other_text_is_harmed_less(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    sayings_memory: RoutingMemory,
    searched: tuple[Search, Trial],
) -> None:
    search, fitted = searched
    other = sayings(30, seed=7)  # of other phrases
    alone = mean_loss(olmoe, zoo_tokenizer, other)

    def harm(routing: RoutingConfig) -> float:
        with attach(olmoe, sayings_memory, routing):
            return mean_loss(olmoe, zoo_tokenizer, other) - alone

    assert abs(harm(search.best.routing)) < abs(harm(fitted.routing))


def widths(routing: RoutingConfig) -> list[float]:
    return [layer.confidence_scale for layer in routing.per_layer]


@pytest.mark.slow
def test_training_on_all_examples_keeps_the_narrower_reach(
    searched: tuple[Search, Trial],
) -> None:
    calibrator = searched[0].calibrator
    fitted = calibrator.try_widths(4)
    assert fitted is not None
    trained = calibrator.try_values(fitted, 4, 0.3)
    assert trained is not None
    wide = calibrator.train_on_all(trained)
    narrow = calibrator.train_on_all(replace(trained, narrowing=4.0))
    for ours, theirs in zip(widths(narrow.routing), widths(wide.routing), strict=True):
        assert ours == pytest.approx(4 * theirs)


def test_a_memory_without_widths_for_single_layers(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    reference = sayings_memory.reference_tokens()
    calibrator = Calibrator(olmoe, sayings_memory, reference, QUICK, ignore_progress)
    unchanged = calibrator.try_unchanged()
    assert unchanged is not None
    assert unchanged.routing.per_layer == ()
    narrower = calibrator.try_narrower(unchanged, 4.0)
    assert narrower is not None
    assert narrower.routing.per_layer[0] == LayerRouting(
        layer=0, confidence_scale=4.0, gamma_scale=unchanged.routing.gamma_scale
    )
