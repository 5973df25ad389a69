"""Prototypes learn through the model of every family, and lower its loss when they are attached."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from helpers.families import FAMILIES, Family
from helpers.zoo import make_texts
from knn_moe import BuildConfig, RoutingConfig, attach, build_memory, find_routers
from knn_moe.adapt.calibrate.build_calibrated import find_gradient
from knn_moe.adapt.distil.prototypes import Start
from knn_moe.adapt.distil.training import Training
from knn_moe.build.optimise import summed_loss


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.name)
def test_prototypes_lower_the_loss_they_learn_from(
    entry: Family, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = entry.build()
    memory = build_memory(model, zoo_tokenizer, make_texts(4), BuildConfig(steps=0))
    reference = memory.reference_tokens()
    (batch,) = reference.batches(4096)
    cases = torch.arange(len(memory))
    starts = [
        Start.of(router, memory.full_layers()[router.layer].keys, cases, 8)
        for router in find_routers(model)
    ]
    gradient = find_gradient(model, reference)
    training = Training(model, starts, torch.float32, [batch], 6, 0.3, gradient)
    for _ in range(6):
        training.run_pass(lambda: None)
    layers = training.read()
    assert layers is not None
    small = replace(memory, layers=dict(layers), folder=None)
    with torch.no_grad():
        alone = float(summed_loss(model, batch))
        with attach(model, small, RoutingConfig(spare_first_token=True)) as routing:
            assert float(summed_loss(model, batch)) < alone
            assert len(routing.stats()) == len(layers)
        assert float(summed_loss(model, batch)) == alone
