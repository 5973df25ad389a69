"""Merged memories of several domains: every case keeps the γ of the memory it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conftest import BUILD
from helpers.calibrating import QUICK, cases_of
from helpers.indexed import CPU, FAST, KINDS, logits, off, run
from helpers.merged import DENSE, SPARSE, USE, dense, ids, merged, model, sparse  # noqa: F401
from knn_moe import RoutingConfig, RoutingMemory, attach, build_memory, calibrate, compress, prune
from knn_moe.adapt.calibrate.fit import Mix
from knn_moe.adapt.calibrate.judge import Recall
from knn_moe.adapt.calibrate.widths import Kernels
from knn_moe.adapt.controls import control
from knn_moe.adapt.prune.recalled import Layer
from knn_moe.equations.mixing import mix_logits
from knn_moe.equations.similarity import SIMILARITIES
from knn_moe.index import FastIndex
from knn_moe.recall import recall as recall_module
from knn_moe.recall.recall import Widths, LayerRecall, RouterCall, layer_gammas, layer_widths


def calls_of(
    model: PreTrainedModel, memory: RoutingMemory, config: RoutingConfig, ids: Tensor
) -> dict[int, RouterCall]:
    calls: dict[int, RouterCall] = {}
    with attach(model, memory, config) as routing, routing.observed(lambda call: note(calls, call)):
        run(model, ids)
    return calls


def note(calls: dict[int, RouterCall], call: RouterCall) -> None:
    calls[call.layer] = call


def by_hand(
    memory: RoutingMemory, call: RouterCall, config: RoutingConfig, gammas: Tensor
) -> tuple[Tensor, Tensor]:
    """§4.2 in float64, case i having γ of its own: mixed logits [T, N] and λ [T]."""
    layer = memory.full_layers()[call.layer]
    squared = torch.cdist(call.inputs.double(), layer.keys.double()).square()
    near, rows = squared.topk(config.k, largest=False)
    kernel = config.for_layer(call.layer)
    share = torch.softmax(-gammas[rows] * kernel.gamma_scale * near, dim=1)
    confidence_factor = torch.exp(-gammas[rows] * widths.confidence_scale * near).mean(dim=1)
    proposal = (share[:, :, None] * layer.values.double()[rows]).sum(dim=1)
    return torch.lerp(call.logits.double(), proposal, confidence_factor[:, None]), confidence_factor


# What it means


def test_a_case_is_weighed_by_its_own_domain(
    model: PreTrainedModel,
    merged: RoutingMemory,
    sparse: RoutingMemory,
    dense: RoutingMemory,
    ids: Tensor,
) -> None:
    domain = torch.cat([torch.zeros(len(sparse)), torch.ones(len(dense))]).long()
    assert torch.equal(merged.provenance.domain, domain)
    for index, call in calls_of(model, merged, USE, ids).items():
        own = (sparse.layers[index].gamma, dense.layers[index].gamma)
        assert merged.layers[index].gammas == own
        mixed, confidence_factor = by_hand(merged, call, USE, torch.tensor(own).double()[domain])
        torch.testing.assert_close(
            call.confidence.double(), confidence_factor, rtol=1e-3, atol=1e-4
        )
        torch.testing.assert_close(call.mixed.double(), mixed, rtol=1e-3, atol=1e-3)
        joint = torch.full((len(domain),), merged.layers[index].gamma).double()
        assert (by_hand(merged, call, USE, joint)[1] - confidence_factor).abs().max() > 0.1


def test_far_from_the_other_domain_it_is_the_memory_alone(
    model: PreTrainedModel, sparse: RoutingMemory, dense: RoutingMemory, ids: Tensor
) -> None:
    layers = {
        index: replace(layer, keys=layer.keys + 30) for index, layer in dense.full_layers().items()
    }
    away = replace(dense, layers=layers, folder=None)
    alone = logits(model, sparse, USE, ids)
    torch.testing.assert_close(logits(model, sparse.merge(away, by_domain=True), USE, ids), alone)
    torch.testing.assert_close(logits(model, away.merge(sparse, by_domain=True), USE, ids), alone)
    blurred = logits(model, sparse.merge(away, by_domain=False), USE, ids)
    assert (blurred - alone).abs().max() > 0.01


def test_one_gamma_is_that_of_all_cases(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    merged: RoutingMemory,
    sparse: RoutingMemory,
    dense: RoutingMemory,
) -> None:
    plain = sparse.merge(dense, by_domain=False)
    assert plain.provenance.num_domains == 1
    together = build_memory(model, tokenizer, SPARSE + DENSE, BUILD)
    for index, layer in plain.layers.items():
        assert layer.gammas == together.layers[index].gammas == ()
        assert layer.gamma == merged.layers[index].gamma
        assert layer.gamma == pytest.approx(together.layers[index].gamma, rel=1e-3)
    assert merged.merge(by_domain=False).layers[0].gammas == ()


@pytest.mark.parametrize("config", [replace(USE, gamma=0.03), replace(USE, similarity="cosine")])
def test_where_gamma_is_given_or_plays_no_part_domains_do_not_either(
    config: RoutingConfig,
    model: PreTrainedModel,
    merged: RoutingMemory,
    sparse: RoutingMemory,
    dense: RoutingMemory,
    ids: Tensor,
) -> None:
    plain = sparse.merge(dense, by_domain=False)
    assert torch.equal(logits(model, merged, config, ids), logits(model, plain, config, ids))
    assert not torch.equal(logits(model, merged, USE, ids), logits(model, plain, USE, ids))


def test_on_unit_vectors_each_domain_has_its_own(
    model: PreTrainedModel,
    merged: RoutingMemory,
    sparse: RoutingMemory,
    dense: RoutingMemory,
    ids: Tensor,
) -> None:
    config = replace(USE, similarity="rbf-unit")
    found = layer_gammas(merged, 1, config, CPU).domains
    alone = [layer_gammas(memory, 1, config, CPU).joint for memory in (sparse, dense)]
    assert found == pytest.approx(alone, rel=1e-4)
    plain = sparse.merge(dense, by_domain=False)
    one, each = (logits(model, memory, config, ids) for memory in (plain, merged))
    assert not torch.equal(one, each)


# With every index


@pytest.mark.parametrize("kind", ["fast, 8 bits", "fast, reranked", "faiss-flat"])
def test_indexes_and_compressed_memories_agree_with_the_exact_search(
    kind: str, model: PreTrainedModel, merged: RoutingMemory, ids: Tensor, tmp_path: Path
) -> None:
    index, limit = KINDS[kind]
    _, own = run(model, ids)
    with attach(model, merged, USE):
        _, exact = run(model, ids)
    with attach(model, merged, replace(USE, index=index)):
        _, found = run(model, ids)
    assert off(found, exact, own) < 2 * limit
    small = compress(merged, index, tmp_path / "small")
    assert small.layers[0].gammas == merged.layers[0].gammas
    with attach(model, small):
        assert torch.equal(run(model, ids)[1], found)
    flipped = {
        number: replace(layer, gammas=layer.gammas[::-1]) for number, layer in small.layers.items()
    }
    with attach(model, replace(small, layers=flipped)):
        assert off(run(model, ids)[1], exact, own) > 0.3


def test_an_index_that_reorders_cases_knows_their_domains(
    model: PreTrainedModel, merged: RoutingMemory, ids: Tensor
) -> None:
    call = calls_of(model, merged, replace(USE, index=KINDS["fast, reranked"][0]), ids)[0]
    keys, domain = merged.full_layers()[0].keys.double(), merged.provenance.domain
    index = call.recall.index
    assert isinstance(index, FastIndex)
    assert not torch.equal(domain[index.rows.long()], domain)
    found, rows = call.recall.nearest(call.inputs)
    squared = (call.inputs.double()[:, None] - keys[rows]).square().sum(dim=-1)
    gammas = torch.tensor(merged.layers[0].gammas).double()[domain[rows]]
    expected = gammas * squared / merged.layers[0].gamma
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_an_index_is_measured_by_each_domains_kernel(merged: RoutingMemory, tmp_path: Path) -> None:
    quality = compress(merged, FAST, tmp_path / "small").layers[0].quality
    assert quality.confidence_error > 0
    layers = {
        index: replace(layer, gammas=(1e-30, 1e-30))
        for index, layer in merged.full_layers().items()
    }
    wide = compress(replace(merged, layers=layers), FAST, tmp_path / "wide")
    assert wide.layers[0].quality.confidence_error == 0  # λ is 1 whatever is found
    assert wide.layers[0].quality.recall == quality.recall


@pytest.mark.parametrize("index", [None, FAST])
def test_compiled(
    index: Any, model: PreTrainedModel, merged: RoutingMemory, ids: Tensor, compiled_state: None
) -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with attach(model, merged, replace(USE, index=index)), torch.no_grad():
        expected = model(ids, use_cache=False).logits
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)


def test_kernels_that_know_one_gamma_only_search(
    merged: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels:
        def __init__(self, *parts: object) -> None:
            self.search = self

    monkeypatch.setattr(recall_module, "usable", lambda *_: True)
    monkeypatch.setattr(recall_module, "Fused", Kernels)
    config, layer = replace(USE, index=FAST), merged.layers[0]
    ratio = torch.ones(len(merged))
    plain, domains = (
        LayerRecall(layer, Widths.single(1.0), config, CPU, ratio=each) for each in (None, ratio)
    )
    assert isinstance(plain.fused, Kernels)
    assert domains.fused is None
    assert isinstance(domains.index.finder, Kernels)  # type: ignore[union-attr]


def test_drawn_cases_leave_confidence_to_the_nearest(
    model: PreTrainedModel, merged: RoutingMemory, ids: Tensor
) -> None:
    drawn = control(merged, "random")
    near, other = (calls_of(model, memory, memory.routing, ids)[0] for memory in (merged, drawn))
    assert torch.equal(near.confidence, other.confidence)
    assert not torch.equal(near.mixed, other.mixed)


# Whatever else reads a memory


def test_explain_measures_in_the_domains_own_distance(
    model: PreTrainedModel, merged: RoutingMemory, ids: Tensor
) -> None:
    with attach(model, merged) as routing:
        told = routing.explain(ids)
    call = calls_of(model, merged, USE, ids)[0]
    layer, seen = merged.full_layers()[0], set()
    for place, token in enumerate(told.tokens):
        case = token.cases[0]
        squared = (call.inputs[place].double() - layer.keys[case.row].double()).square().sum()
        domain = int(merged.provenance.domain[case.row])
        seen.add(domain)
        expected = float(squared * layer.gammas[domain]) ** 0.5
        assert case.distance == pytest.approx(expected, rel=1e-3, abs=1e-3)
        assert case.confidence == pytest.approx(float(call.confidence[place]), abs=1e-5)
    assert seen == {0, 1}


@pytest.mark.parametrize("config", [USE, replace(USE, gamma=0.03)])
def test_calibration_and_pruning_recall_as_routing_does(
    config: RoutingConfig, model: PreTrainedModel, merged: RoutingMemory, ids: Tensor
) -> None:
    call = calls_of(model, merged, config, ids)[0]
    inputs, own = call.inputs, call.logits
    stranger, owner = torch.full((len(inputs),), 5), torch.zeros(len(merged), dtype=torch.int64)
    cases = replace(cases_of(model, merged)[0], owner=owner)
    judged = Recall(cases, config)
    judged.owner = stranger
    torch.testing.assert_close(judged(inputs, own), call.mixed)
    gammas = layer_gammas(merged, 0, config, CPU)
    kernel = layer_widths(gammas.joint, 0, config)
    ratio = gammas.ratio(merged.provenance)
    layer = Layer(merged.full_layers()[0], owner, kernel, SIMILARITIES["rbf"], config.k, ratio)
    found = layer.recall(inputs, stranger)
    mixed = mix_logits(own.float(), found.proposal, found.confidence_factor)
    torch.testing.assert_close(mixed, call.mixed)
    if config.gamma is None:
        mix = Mix(cases, Kernels({0: cases.gamma}, CPU, [config.for_layer(0)]), config.k)
        mix.rows = found.rows
        torch.testing.assert_close(mix(inputs, own), call.mixed, rtol=1e-4, atol=1e-4)


def test_what_a_case_is_worth_depends_on_its_domains_kernel(
    model: PreTrainedModel, merged: RoutingMemory
) -> None:
    plain = merged.merge(by_domain=False)  # with the same γ of all cases
    for judge in (model, None):
        kept, other = (prune(judge, memory, 0.5).provenance.key for memory in (merged, plain))
        assert not torch.equal(kept, other)


def test_calibrated_and_pruned_it_keeps_its_domains(
    model: PreTrainedModel, merged: RoutingMemory, ids: Tensor, tmp_path: Path
) -> None:
    calibrated = calibrate(model, merged, config=QUICK).apply(merged)
    calibrated.save_pretrained(tmp_path / "calibrated")
    opened = RoutingMemory.from_pretrained(tmp_path / "calibrated")
    small = prune(model, merged, 0.25)
    for memory in (opened, small):
        assert {i: layer.gammas for i, layer in memory.layers.items()} == gammas_of(merged)
        assert memory.provenance.num_domains == 2
    assert torch.equal(logits(model, opened, None, ids), logits(model, calibrated, None, ids))
    assert sum(small.provenance.cases_of_domain) == len(small) < len(merged)


def gammas_of(memory: RoutingMemory) -> Mapping[int, tuple[float, ...]]:
    return {index: layer.gammas for index, layer in memory.layers.items()}
