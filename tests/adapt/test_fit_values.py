"""What calibration fits: widths, the start of the values, and the values themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import look_up, open_cases
from helpers.zoo import BUILD, family, make_texts
from knn_moe import (
    RoutingConfig,
    RoutingMemory,
    build_memory,
    find_routers,
)
from knn_moe.adapt.calibrate import fit
from knn_moe.adapt.calibrate.fit import FitCases, FitData, fit_widths, install_fitted_recall
from knn_moe.adapt.calibrate.start import Direction, choose_start
from knn_moe.adapt.calibrate.values import ValueTraining, train_values
from knn_moe.adapt.calibrate.widths import WidthParameters
from knn_moe.config import LayerRouting
from knn_moe.routers.own_logits import compute_own_logits


def fitted_loss(
    model: PreTrainedModel,
    cases: list[FitCases],
    data: FitData,
    widths: tuple[LayerRouting, ...],
) -> float:
    """Return the loss of all batches with these widths and four neighbours."""
    gammas = {each.router.layer: each.gamma for each in cases}
    parameters = WidthParameters(gammas, torch.device("cpu"), widths)
    with torch.no_grad(), install_fitted_recall(cases, parameters, 4) as recalls:
        return sum(
            float(fit.mean_loss(model, recalls, data, place)) * int(batch.scored.sum())
            for place, batch in enumerate(data.batches)
        )


@pytest.mark.slow
def test_more_steps_fit_better(olmoe: PreTrainedModel, sayings_memory: RoutingMemory) -> None:
    cases = open_cases(olmoe, sayings_memory)
    data = look_up(olmoe, sayings_memory, cases)
    routing = RoutingConfig(k=4)
    losses = [
        fitted_loss(olmoe, cases, data, fit_widths(olmoe, cases, data, routing, steps)[0])
        for steps in (8, 32, 96)
    ]
    assert losses == sorted(losses, reverse=True)
    assert all(parameter.grad is None for parameter in olmoe.parameters())
    assert not any(router.scope._forward_pre_hooks for router in find_routers(olmoe))


@pytest.mark.slow
def test_values_are_rescaled_where_that_helps(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    """A tenth of what the build changed is too little, and is made more, by one factor a layer."""
    cases = []
    for each in open_cases(olmoe, sayings_memory):
        own = compute_own_logits(each.router, each.keys)
        cases.append(replace(each, values=own + 0.1 * (each.values - own), own=own))
    data = look_up(olmoe, sayings_memory, cases)
    widths, rescaled = fit_widths(olmoe, cases, data, RoutingConfig(k=4), 96)
    fixed = [replace(each, own=None) for each in cases]
    plain, same = fit_widths(olmoe, fixed, data, RoutingConfig(k=4), 96)
    better = fitted_loss(olmoe, rescaled, data, widths)
    assert better < fitted_loss(olmoe, fixed, data, plain)
    for each, after, kept in zip(cases, rescaled, same, strict=True):
        assert kept.values is each.values
        change = (each.values - each.own).flatten()
        moved = change.abs() > 0.01
        ratio = (after.values - each.own).flatten()[moved] / change[moved]
        assert ratio.mean() > 1.5
        assert after.update_scale == pytest.approx(float(ratio.mean()), rel=1e-3)
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-2, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_values_start_at_the_best_distance_whatever_the_size_of_the_steps(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory, size: float
) -> None:
    """Relative to the spread of the logits: the same start for steps a thousand times as long."""
    cases = open_cases(olmoe, sayings_memory)
    data = look_up(olmoe, sayings_memory, cases)
    expected = choose_start(olmoe, [Direction.of(each) for each in cases], data, 4)
    moved = []
    for each in cases:
        own = compute_own_logits(each.router, each.keys)
        moved.append(Direction.of(replace(each, values=own + size * (each.values - own))))
    start = choose_start(olmoe, moved, data, 4)
    assert start.distance == expected.distance > 0
    assert start.losses[start.distance] == min(start.losses.values())
    assert start.losses == pytest.approx(expected.losses, rel=1e-4)
    for one, other in zip(start.cases, expected.cases, strict=True):
        torch.testing.assert_close(one.values, other.values, rtol=1e-3, atol=1e-3)
        assert one.update_scale == pytest.approx(other.update_scale / size, rel=1e-2)


def own_steps(before: FitCases, after: FitCases, recalled: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far each value was moved for itself, and how far by the linear map of the keys.

    The map is what moved the values that no token recalled.
    """
    change = after.values - before.values
    never = torch.ones(len(change), dtype=torch.bool)
    never[recalled] = False
    keys = before.keys.float()
    shared = keys @ torch.linalg.lstsq(keys[never], change[never]).solution
    torch.testing.assert_close(shared[never], change[never], rtol=0, atol=1e-5)
    return change - shared, shared


def test_values_descend_the_loss_of_the_tokens_that_recall_them(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    """Adam's first step against the loss's slope by differences. It moves the value itself and,
    through the linear map of the keys, all others."""
    cases = open_cases(olmoe, sayings_memory)
    data = look_up(olmoe, sayings_memory, cases)
    data = FitData(data.batches[:1], data.tables)
    widths = tuple(LayerRouting(layer=each.router.layer, confidence_factor=0.9) for each in cases)
    start, rate = RoutingConfig(k=4, per_layer=widths), 1e-3
    training = ValueTraining(1, rate, "sparse", [1.0] * len(cases))
    _, trained = train_values(olmoe, cases, data, start, training)
    for place, (each, after) in enumerate(zip(cases, trained, strict=True)):
        recalled = data.tables[place].rows[0].unique()
        step, shared = own_steps(each, after, recalled)
        assert 0 < float(shared.abs().max()) / rate < 4 * 8
        step = step / rate
        slopes = {}
        for row in recalled[:6].tolist():
            losses = []
            for change in (0.1, -0.1):
                values = each.values.clone()
                values[row, 0] += change
                moved = [*cases]
                moved[place] = replace(each, values=values)
                losses.append(fitted_loss(olmoe, moved, data, widths))
            slopes[row] = losses[0] - losses[1]
        row = max(slopes, key=lambda row: abs(slopes[row]))
        assert step[row, 0].item() == pytest.approx(-math.copysign(1, slopes[row]), rel=2e-2)
    assert cases[0].values.equal(sayings_memory.full_layers()[0].values)


def test_values_are_trained_through_all_experts(zoo_tokenizer: PreTrainedTokenizerFast) -> None:
    """Where chosen experts' weights sum to one, the sparse gradient of all other logits is 0."""
    model = family("qwen3_moe")
    memory = build_memory(model, zoo_tokenizer, make_texts(30), BUILD)
    cases = open_cases(model, memory)
    data = look_up(model, memory, cases)
    widths = tuple(LayerRouting(layer=each.router.layer, confidence_factor=0.9) for each in cases)
    start = RoutingConfig(k=4, per_layer=widths)
    data = FitData(data.batches[:1], data.tables)
    recalled = data.tables[-1].rows[0].unique()
    before = fitted_loss(model, cases, data, widths)
    moved = {}
    for gradient in ("sparse", "dense"):
        _, trained = train_values(
            model, cases, data, start, ValueTraining(1, 0.02, gradient, [1.0] * len(cases))
        )
        assert fitted_loss(model, trained, data, widths) < before
        step, _ = own_steps(cases[-1], trained[-1], recalled)
        moved[gradient] = float((step[recalled].abs() > 0.01).float().mean())
    assert moved["sparse"] < 0.95 * moved["dense"]


def test_first_tokens_are_left_to_the_router(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    """Cases that only first tokens recall may have any value."""
    cases = open_cases(olmoe, sayings_memory)
    data = look_up(olmoe, sayings_memory, cases)
    data = FitData(data.batches[:1], data.tables)
    first = data.batches[0].first_tokens
    assert int(first.sum()) == len(data.batches[0].ids)
    widths = tuple(LayerRouting(layer=each.router.layer, confidence_factor=0.9) for each in cases)
    losses = []
    for ruin in (first & False, first, ~first):
        ruined = []
        for each, table in zip(cases, data.tables, strict=True):
            rows = table.rows[0].clone()
            rows[ruin] = len(each.keys)
            values = torch.cat([each.values, torch.tensor([[9.0] + [0.0] * 7])])
            keys = torch.cat([each.keys, each.keys[:1]])
            ruined.append((replace(each, keys=keys, values=values), fit.NeighbourTable([rows])))
        moved = [one for one, _ in ruined]
        tables = [table for _, table in ruined]
        losses.append(fitted_loss(olmoe, moved, FitData(data.batches, tables), widths))
    assert losses[1] == pytest.approx(losses[0])
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)
