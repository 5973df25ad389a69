"""Layers that must not be rerouted are found and left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from helpers.calibrating import QUICK, look_up, open_cases
from knn_moe import RoutingMemory, attach, calibrate
from knn_moe.adapt.calibrate.fragile_layers import find_fragile_layers
from knn_moe.adapt.calibrate.start import Direction


def test_a_layer_that_ruins_the_model_when_it_alone_is_rerouted(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    """Its values lead the wrong way, and much farther than they say."""
    cases = open_cases(olmoe, sayings_memory)
    data = look_up(olmoe, sayings_memory, cases)
    first, second = (Direction.of(each) for each in cases)
    assert find_fragile_layers(olmoe, [first, second], data, 4) == []
    wrong = replace(second.cases, values=2 * second.own - second.cases.values)
    ruinous = replace(second, cases=wrong, spread=1e3)
    assert find_fragile_layers(olmoe, [first, ruinous], data, 4) == [1]


@pytest.mark.slow
def test_a_fragile_layer_is_neither_trained_nor_attached(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.find_fragile_layers", lambda *args: [1])
    found = calibrate(olmoe, sayings_memory, config=replace(QUICK, neighbours=(4,)))
    assert found.left_out == (1,)
    assert found.report()["left_out"] == [1]
    assert found.routing.layers == (0,)
    after = found.apply(sayings_memory)
    before = sayings_memory.full_layers()
    assert after.full_layers()[1].values.equal(before[1].values)
    assert found.values_trained != after.full_layers()[0].values.equal(before[0].values)
    with torch.no_grad(), attach(olmoe, after) as routing:
        olmoe(torch.arange(3, 20)[None])
    assert set(routing.stats()) == {0}
