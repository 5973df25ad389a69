"""Every index on a running model: near the exact search, and the same when compressed and saved."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.indexed import (
    CPU,
    FAST,
    KINDS,
    MANY,
    every_kind,
    logits,
    meant_for,
    of_rows,
    off,
    run,
    uneven,
)
from helpers.near_ties import MARGIN
from helpers.points import squared_distances
from helpers.zoo import BUILD, TEXTS, encode, make_texts
from knn_moe import IndexConfig, RoutingConfig, RoutingMemory, attach, build_memory, compress
from knn_moe.adapt.compress import compress_layer
from knn_moe.adapt.controls import shuffle_values
from knn_moe.equations.similarity import SIMILARITIES
from knn_moe.errors import ConfigError
from knn_moe.explain.trace import trace
from knn_moe.index.fast.grid import principal_axes
from knn_moe.inference.attach import Routing
from knn_moe.recall.layer import LayerRecall
from knn_moe.recall.neighbours import Widths


@pytest.fixture(scope="module")
def uneven_model() -> PreTrainedModel:
    return uneven()


@pytest.fixture(scope="module")
def uneven_memory(zoo_tokenizer: object) -> RoutingMemory:
    return build_memory(uneven(), zoo_tokenizer, MANY, BUILD)


@pytest.fixture(scope="module")
def small(uneven_memory: RoutingMemory, tmp_path_factory: pytest.TempPathFactory) -> RoutingMemory:
    return compress(uneven_memory, FAST, tmp_path_factory.mktemp("memories") / "small")


@pytest.fixture(scope="module")
def ids(zoo_tokenizer: Any) -> Tensor:
    texts = make_texts(6, seed=5, shortest=9, longest=9)
    return torch.cat([encode(zoo_tokenizer, text) for text in texts])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "similarity"),
    [
        *((kind, "rbf") for kind in KINDS),
        ("fast", "cosine"),
        ("fast", "rbf-unit"),
        ("ivfpq, reranked", "cosine"),
        ("faiss-flat", "rbf-unit"),
    ],
)
def test_an_index_is_near_the_exact_search_and_the_same_when_saved(
    kind: str,
    similarity: str,
    uneven_model: PreTrainedModel,
    uneven_memory: RoutingMemory,
    ids: Tensor,
    tmp_path: Path,
) -> None:
    index, limit = KINDS[kind]
    _, own = run(uneven_model, ids)
    with attach(uneven_model, uneven_memory, RoutingConfig(k=3, similarity=similarity)):
        _, exact = run(uneven_model, ids)
    config = RoutingConfig(k=3, similarity=similarity, index=index)
    with attach(uneven_model, uneven_memory, config):
        expected, found = run(uneven_model, ids)
    assert off(found, exact, own) < limit
    full = meant_for(uneven_memory, k=3, similarity=similarity)
    made = compress(full, index, tmp_path / "made")
    assert torch.equal(logits(uneven_model, made, None, ids), expected)
    made.save_pretrained(tmp_path / "saved")
    opened = RoutingMemory.from_pretrained(tmp_path / "saved")
    assert opened.manifest == made.manifest
    assert opened.manifest.routing == config
    assert torch.equal(logits(uneven_model, opened, None, ids), expected)
    first, second = (
        (tmp_path / name / "layer-000.safetensors").read_bytes() for name in ("made", "saved")
    )
    assert first == second
    assert f"{index.kind} index" in (tmp_path / "saved" / "README.md").read_text()


def test_what_a_wrong_index_would_show(
    uneven_model: PreTrainedModel, uneven_memory: RoutingMemory, ids: Tensor
) -> None:
    _, own = run(uneven_model, ids)
    found = {}
    for name in SIMILARITIES:
        with attach(uneven_model, uneven_memory, RoutingConfig(k=3, similarity=name)):
            _, found[name] = run(uneven_model, ids)
    for one, other in itertools.permutations(SIMILARITIES, 2):
        assert off(found[one], found[other], own) > 0.15
    with attach(uneven_model, shuffle_values(uneven_memory), RoutingConfig(k=3)):
        assert off(run(uneven_model, ids)[1], found["rbf"], own) > 1


def test_a_layer_that_was_never_written(
    uneven_model: PreTrainedModel, uneven_memory: RoutingMemory, small: RoutingMemory, ids: Tensor
) -> None:
    layers = {
        number: compress_layer(
            layer,
            layer.gamma,
            Widths.of(layer.gamma, number, small.routing),
            small.routing,
            CPU,
        )
        for number, layer in uneven_memory.full_layers().items()
    }
    fresh = replace(small, layers=layers, folder=None)
    assert torch.equal(
        logits(uneven_model, fresh, None, ids), logits(uneven_model, small, None, ids)
    )
    assert fresh.nbytes == small.nbytes


def test_an_index_by_its_name(
    uneven_model: PreTrainedModel,
    uneven_memory: RoutingMemory,
    small: RoutingMemory,
    ids: Tensor,
    tmp_path: Path,
) -> None:
    expected = logits(uneven_model, uneven_memory, RoutingConfig(index="fast"), ids)
    assert torch.equal(logits(uneven_model, small, None, ids), expected)
    assert torch.equal(
        logits(uneven_model, compress(uneven_memory, "fast", tmp_path / "m"), None, ids), expected
    )


def test_a_cosine_memory_serves_rbf_on_unit_vectors_as_well(
    uneven_model: PreTrainedModel, uneven_memory: RoutingMemory, ids: Tensor, tmp_path: Path
) -> None:
    made = compress(meant_for(uneven_memory, similarity="cosine"), FAST, tmp_path / "made")
    expected = logits(
        uneven_model, uneven_memory, RoutingConfig(similarity="rbf-unit", index=FAST), ids
    )
    found = logits(uneven_model, made, RoutingConfig(similarity="rbf-unit"), ids)
    assert torch.equal(found, expected)


def test_gamma_is_the_memorys_own_whatever_its_routing_says(
    uneven_model: PreTrainedModel, uneven_memory: RoutingMemory, ids: Tensor, tmp_path: Path
) -> None:
    full = meant_for(uneven_memory, gamma=0.2, gamma_scale=0.5)
    made = compress(full, FAST, tmp_path / "made")
    for config in (RoutingConfig(), RoutingConfig(gamma_scale=0.5), full.routing):
        expected = logits(uneven_model, uneven_memory, replace(config, index=FAST), ids)
        assert torch.equal(logits(uneven_model, made, config, ids), expected)
    assert made.layers[0].gamma == uneven_memory.layers[0].gamma
    twice = of_rows(uneven_memory, torch.arange(20).repeat(2))
    extreme = meant_for(twice, gamma=3e38, gamma_scale=1e3)
    quality = compress(extreme, FAST, tmp_path / "extreme").layers[0].quality
    assert 0 <= quality.confidence_error <= 1  # γ is past fp32


@pytest.mark.slow
def test_what_is_asked_of_a_compressed_index(
    uneven_model: PreTrainedModel, uneven_memory: RoutingMemory, ids: Tensor, tmp_path: Path
) -> None:
    """Its own options, except for the probes and whether to rank again."""
    for index in (IndexConfig(kind="fast", rerank=True), IndexConfig(kind="ivfpq", rerank=True)):
        made = compress(uneven_memory, index, tmp_path / index.kind)
        for asked in (index, replace(index, rerank=False), replace(index, probes=1)):
            expected = logits(uneven_model, uneven_memory, RoutingConfig(index=asked), ids)
            found = logits(uneven_model, made, RoutingConfig(index=asked), ids)
            # FAISS adds in another order with tables than without, on some machines.
            exactly = {"rtol": 0.0, "atol": 0.0} if index.kind == "fast" else {}
            torch.testing.assert_close(found, expected, **exactly)


@pytest.mark.parametrize(("name", "value"), [("bits", 8), ("value_bits", 4), ("dims", 64)])
def test_a_compressed_index_cannot_be_changed(
    name: str, value: int, uneven_model: PreTrainedModel, small: RoutingMemory
) -> None:
    config = RoutingConfig(index=replace(FAST, **{name: value}))
    with pytest.raises(ConfigError, match=f"cannot be searched with {name}={value}. Leave it out"):
        attach(uneven_model, small, config)


@pytest.mark.parametrize(
    "rows",
    [[7], [3, 7, 9], [*range(1, 13)], [7] * 40],
    ids=["one", "three", "a dozen", "forty equal"],
)
@every_kind
def test_memories_of_few_cases(
    kind: str,
    rows: list[int],
    uneven_model: PreTrainedModel,
    uneven_memory: RoutingMemory,
    ids: Tensor,
    tmp_path: Path,
) -> None:
    few = meant_for(of_rows(uneven_memory, torch.tensor(rows)), k=3)
    made = compress(few, KINDS[kind][0], tmp_path / "made")
    assert len(made) == len(made.layers[0]) == len(rows)
    assert made.layers[0].quality.recall == 1
    with attach(uneven_model, few) as routing:
        exact = trace(uneven_model, routing, ids)[0]
    with attach(uneven_model, made) as routing:
        found = trace(uneven_model, routing, ids)[0]
    ratio = found.squared_distance / exact.squared_distance
    # Queries beyond the edge of a grid for a few keys seem nearer than they are.
    least = 0.5 if KINDS[kind][0] in (FAST, replace(FAST, bits=8)) else 0.99
    assert least < ratio.min()
    assert ratio.max() < 1.1


def test_axes_of_equal_keys(uneven_memory: RoutingMemory) -> None:
    """Only rounding errors are left of them: for one key in fifty, fp32 solvers find no axes."""
    for key in uneven_memory.full_layers()[0].keys[:150]:
        for count in (3, 40):
            rest = key.repeat(count, 1) - key.repeat(count, 1).mean(dim=0)
            axes = principal_axes(rest.T @ rest)
            torch.testing.assert_close(axes.T @ axes, torch.eye(32), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_compiled(
    uneven_model: PreTrainedModel, small: RoutingMemory, ids: Tensor, compiled_state: None
) -> None:
    compiled = torch.compile(uneven_model, backend="eager", fullgraph=True)
    with attach(uneven_model, small, RoutingConfig(k=3)) as routing, torch.no_grad():
        expected = uneven_model(ids, use_cache=False).logits
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)
        assert {(layer.calls, layer.tokens) for layer in routing.stats().values()} == {(2, 108)}


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None, reason="torch.compile needs a C++ compiler on CPUs")
@pytest.mark.parametrize("index", [None, FAST], ids=["exact", "fast"])
def test_compiled_by_the_default_compiler(
    index: IndexConfig | None, uneven_memory: RoutingMemory, compiled_state: None
) -> None:
    """It rewrites expressions, and may lose a factor on the way: other cases would be found."""
    layer = uneven_memory.full_layers()[0]
    config = RoutingConfig(k=3, index=index)
    recall = LayerRecall(layer, Widths(layer.gamma, layer.gamma), config, CPU)
    inputs, own = layer.keys[::40].float() + 0.1, layer.values[1::40]
    distance = squared_distances(inputs[: len(own)], layer.keys).sort(dim=-1).values
    clear = distance[:, 3] > (1 + MARGIN) * distance[:, 2]  # no near tie
    inputs, own = inputs[: len(own)][clear], own[clear]
    assert len(own) > 5
    for count in (1, len(own)):
        expected = recall(inputs[:count], own[:count])
        found = torch.compile(recall, dynamic=False)(inputs[:count], own[:count])
        torch.testing.assert_close(found, expected)


@pytest.fixture(scope="module")
def bfloat16_model() -> PreTrainedModel:
    return uneven().to(torch.bfloat16)


@pytest.fixture(scope="module")
def bfloat16_memory(bfloat16_model: PreTrainedModel, zoo_tokenizer: object) -> RoutingMemory:
    return meant_for(build_memory(bfloat16_model, zoo_tokenizer, TEXTS[:4], BUILD), k=2)


@every_kind
def test_bfloat16(
    kind: str,
    bfloat16_model: PreTrainedModel,
    bfloat16_memory: RoutingMemory,
    ids: Tensor,
    tmp_path: Path,
) -> None:
    made = compress(bfloat16_memory, KINDS[kind][0], tmp_path / "made")
    assert made.layers[0].shape.dtype == torch.bfloat16
    config = replace(bfloat16_memory.routing, index=KINDS[kind][0])
    found = logits(bfloat16_model, RoutingMemory.from_pretrained(tmp_path / "made"), None, ids)
    assert torch.equal(found, logits(bfloat16_model, bfloat16_memory, config, ids))
    assert found.dtype == torch.bfloat16


# What traces and counts say


def test_a_trace_of_a_fast_index_gives_rows_of_the_memory(
    uneven_model: PreTrainedModel, uneven_memory: RoutingMemory, small: RoutingMemory, ids: Tensor
) -> None:
    with attach(uneven_model, uneven_memory, RoutingConfig(k=3)) as routing:
        exact = trace(uneven_model, routing, ids)
    for config in (RoutingConfig(k=3), RoutingConfig(k=3, index=FAST)):
        with attach(uneven_model, small, config) as routing:
            found = trace(uneven_model, routing, ids)
        assert found[0].rows.shape == exact[0].rows.shape
        assert (found[0].rows[:, 0] == exact[0].rows[:, 0]).float().mean() > 0.7
        distance = exact[0].squared_distance
        assert (found[0].squared_distance - distance).abs().median() < 0.1 * distance.median()
        assert torch.equal(found[0].before, exact[0].before)
        assert (found[0].after == exact[0].after).float().mean() > 0.8
        assert (found[0].confidence - exact[0].confidence).abs().mean() < 0.03


def test_a_text_of_the_reference_recalls_itself(
    uneven_model: PreTrainedModel, small: RoutingMemory, zoo_tokenizer: Any
) -> None:
    ids = encode(zoo_tokenizer, MANY[3])
    with attach(uneven_model, small) as routing:
        rows = trace(uneven_model, routing, ids)[0].rows[:, 0].tolist()
    itself = [
        small.provenance.context(row, before=100, after=0)[0] == ids[0, : token + 1].tolist()
        for token, row in enumerate(rows)
    ]
    assert sum(itself) >= 0.9 * len(itself)


def test_counts(uneven_model: PreTrainedModel, small: RoutingMemory, ids: Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    real = mask.bool().flatten()

    @torch.no_grad()
    def chosen() -> Tensor:
        output = uneven_model(ids, attention_mask=mask, use_cache=False, output_router_logits=True)
        return output.router_logits[0].topk(2).indices.sort().values

    before = chosen()
    with attach(uneven_model, small, RoutingConfig(layers=(0,))) as routing:
        after = chosen()
        calls = counted(routing)
        chosen()
        assert counted(routing) == (2, 2 * calls[1], calls[2])
    changed = (before != after).any(dim=-1)[real]
    assert calls == (1, int(mask.sum()), pytest.approx(float(changed.float().mean())))
    assert 0 < calls[2] < 1
    with attach(uneven_model, small, RoutingConfig(stats=False)) as routing:
        chosen()
        assert routing.stats()[0].changed is None


def counted(routing: Routing) -> tuple[int, int, float | None]:
    stats = routing.stats()[0]
    return stats.calls, stats.tokens, stats.changed
