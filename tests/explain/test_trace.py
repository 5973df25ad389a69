"""A trace against the same thing by hand, and against the model's own router logits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.near_ties import assert_no_near_ties
from helpers.zoo import BUILD, TEXTS, encode, family, make_texts
from knn_moe import RoutingConfig, RoutingMemory, attach, build_memory, find_routers
from knn_moe.errors import AttachError, ConfigError
from knn_moe.explain.trace import LayerTrace, trace, trace_both
from knn_moe.routers.own_logits import compute_own_logits

three_families = pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "gpt_oss"])


def router_inputs(model: PreTrainedModel, run: Callable[[], object]) -> dict[int, Tensor]:
    """What each router was given while `run` ran the model."""
    seen: dict[int, Tensor] = {}
    handles = []
    for router in find_routers(model):

        def look(module: object, args: tuple[Tensor, ...], layer: int = router.layer) -> None:
            seen[layer] = args[0].detach().reshape(-1, 32)

        handles.append(router.module.register_forward_pre_hook(look))
    run()
    for handle in handles:
        handle.remove()
    return seen


def experts(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The experts of each MoE layer, from the router logits the model returns."""
    logits = model(ids, use_cache=False, output_router_logits=True).router_logits
    return [layer.reshape(-1, 8).topk(2).indices.sort().values for layer in logits]


@three_families
def test_equals_the_same_by_hand(name: str, zoo_tokenizer: object, prompt: Tensor) -> None:
    model = family(name)
    memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    assert_no_near_ties(model, memory, prompt, RoutingConfig(k=3))
    base = experts(model, prompt)
    traced: dict[int, LayerTrace] = {}
    with attach(model, memory, RoutingConfig(k=3)) as routing:
        inputs = router_inputs(model, lambda: traced.update(trace(model, routing, prompt)))
        stats = routing.stats()
        used = experts(model, prompt)
    assert list(traced) == list(memory.layers) == list(inputs)
    for place, (index, layer) in enumerate(traced.items()):
        cases = memory.layers[index]
        distance = torch.cdist(inputs[index].double(), cases.keys.double()).square()
        nearest, rows = distance.topk(3, largest=False)
        similarity = torch.exp(-cases.gamma * nearest)
        torch.testing.assert_close(layer.squared_distance, nearest.float(), rtol=1e-4, atol=1e-5)
        assert torch.equal(layer.rows, rows)
        weight = (similarity / similarity.sum(dim=1, keepdim=True)).float()
        torch.testing.assert_close(layer.weight, weight, rtol=1e-3, atol=1e-5)
        confidence = similarity.mean(dim=1).float()
        torch.testing.assert_close(layer.confidence, confidence, rtol=1e-3, atol=1e-5)
        assert torch.equal(layer.after, used[place])
        if place == 0:
            assert torch.equal(layer.before, base[0])
        proposal = (weight.double()[:, :, None] * cases.values.double()[rows]).sum(dim=1)
        own = compute_own_logits(find_routers(model)[place], inputs[index]).double()
        change = confidence.double()[:, None] * (proposal - own)
        torch.testing.assert_close(layer.change.double(), change, rtol=1e-2, atol=1e-3)
        changed = (layer.before != layer.after).any(dim=1)
        assert stats[index].changed == pytest.approx(float(changed.float().mean()))
        assert stats[index].mean_confidence == pytest.approx(float(layer.confidence.mean()))
        assert stats[index].tokens == len(layer.rows) == prompt.numel()
    assert any((layer.before != layer.after).any() for layer in traced.values())


@three_families
def test_beside_it_is_what_the_model_does_alone(
    name: str, zoo_tokenizer: object, prompt: Tensor
) -> None:
    model = family(name)
    memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    with torch.no_grad():
        base, logits = experts(model, prompt), model(prompt, use_cache=False).logits[0]
    with attach(model, memory, RoutingConfig(k=3)) as routing:
        expected = trace(model, routing, prompt)
        runs = trace_both(model, routing, prompt[0], first=4)
    assert list(runs.layers) == list(runs.experts_alone) == list(expected)
    for index, layer in expected.items():
        assert torch.equal(runs.layers[index].rows, layer.rows)
        assert torch.equal(runs.experts_alone[index], base[list(expected).index(index)])
    found = runs.next_tokens
    assert found is not None
    assert found.tokens.shape == found.alone.shape == found.with_memory.shape == (5, 11)
    probability = logits[4:].float().softmax(dim=-1)
    torch.testing.assert_close(found.alone, probability.gather(1, found.tokens))
    assert found.tokens[:-1, 0].tolist() == prompt[0, 5:].tolist()


@three_families
def test_a_text_of_the_reference_recalls_itself(
    name: str, zoo_tokenizer: Callable[..., dict[str, list[int]]]
) -> None:
    model = family(name)
    memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    ids = encode(zoo_tokenizer, TEXTS[3])
    with attach(model, memory) as routing:
        first = trace(model, routing, ids)[0]
    torch.testing.assert_close(first.squared_distance, torch.zeros_like(first.squared_distance))
    torch.testing.assert_close(first.confidence, torch.ones_like(first.confidence))
    torch.testing.assert_close(first.weight, torch.ones_like(first.weight))
    for token, row in enumerate(first.rows[:, 0].tolist()):
        context, place = memory.provenance.context(row, before=100, after=0)
        assert context == ids[0, : token + 1].tolist()
        assert place == token


@pytest.mark.parametrize("similarity", ["rbf", "rbf-unit", "cosine"])
def test_every_similarity(
    similarity: str, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=4, similarity=similarity)) as routing:
        traced = trace(zoo_olmoe, routing, prompt)
    for layer in traced.values():
        assert layer.rows.shape == layer.weight.shape == (9, 4)
        assert (layer.squared_distance.diff(dim=1) >= 0).all()
        assert (layer.weight.diff(dim=1) <= 1e-6).all()
        torch.testing.assert_close(layer.weight.sum(dim=1), torch.ones(9))


def test_before_is_known_without_statistics(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory) as routing:
        expected = trace(zoo_olmoe, routing, prompt)
    with attach(zoo_olmoe, zoo_memory, replace(zoo_memory.routing, stats=False)) as routing:
        silent = trace(zoo_olmoe, routing, prompt)
        assert routing.stats()[0].changed is None
    for index in expected:
        assert torch.equal(silent[index].before, expected[index].before)
        assert torch.equal(silent[index].after, expected[index].after)


def test_swapped_experts() -> None:
    nothing = torch.zeros(3, 1)
    layer = LayerTrace(
        *(nothing, nothing, nothing, nothing[:, 0]),
        before=torch.tensor([[0, 3], [1, 2], [4, 5]]),
        after=torch.tensor([[0, 3], [2, 7], [1, 6]]),
        change=torch.zeros(3, 8),
    )
    assert layer.swapped(0) == ((), ())
    assert layer.swapped(1) == ((7,), (1,))
    assert layer.swapped(2) == ((1, 6), (4, 5))
    assert all(isinstance(expert, int) for expert in layer.swapped(2)[0])


def test_a_batch_is_its_rows_one_after_the_other(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    ids = torch.randint(3, 128, (3, 7))
    assert_no_near_ties(zoo_olmoe, zoo_memory, ids, RoutingConfig(k=2))
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=2)) as routing:
        together = trace(zoo_olmoe, routing, ids)
        alone = [trace(zoo_olmoe, routing, row[None]) for row in ids]
    for index, layer in together.items():
        assert torch.equal(layer.rows, torch.cat([one[index].rows for one in alone]))
        torch.testing.assert_close(
            layer.confidence,
            torch.cat([one[index].confidence for one in alone]),
            rtol=1e-4,
            atol=1e-5,
        )


def test_tracing_leaves_the_model_as_it_was(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory) as routing:
        before = zoo_olmoe(prompt, use_cache=False).logits
        trace(zoo_olmoe, routing, prompt)
        assert routing._pass.now.observer is None
        assert torch.equal(zoo_olmoe(prompt, use_cache=False).logits, before)
        assert {layer.calls for layer in routing.stats().values()} == {3}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_run_leaves_no_observer(
    error: type[BaseException],
    zoo_olmoe: PreTrainedModel,
    zoo_memory: RoutingMemory,
    prompt: Tensor,
) -> None:
    def fail(module: object, args: object) -> None:
        raise error

    with attach(zoo_olmoe, zoo_memory) as routing:
        broken = zoo_olmoe.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(error):
            trace(zoo_olmoe, routing, prompt)
        assert routing._pass.now.observer is None
        broken.remove()
        assert set(trace(zoo_olmoe, routing, prompt)) == {0, 1}


@pytest.mark.slow
def test_a_compiled_model_is_traced_and_not_compiled_again(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor, compiled_state: None
) -> None:
    compilations = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(zoo_olmoe, backend=count, fullgraph=True)
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=2)) as routing, torch.no_grad():
        expected = trace(zoo_olmoe, routing, prompt)
        compiled(prompt, use_cache=False)
        traced = trace(compiled, routing, prompt)
        compiled(prompt, use_cache=False)
        assert {layer.calls for layer in routing.stats().values()} == {4}
    assert len(compilations) == 1
    for index, layer in expected.items():
        for name, value in vars(layer).items():
            assert torch.equal(getattr(traced[index], name), value)


def test_only_the_attached_layers(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(layers=(1,))) as routing:
        assert set(trace(zoo_olmoe, routing, prompt)) == {1}


def test_an_empty_memory_has_no_trace(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    layers = {
        index: replace(layer, keys=layer.keys[:0], values=layer.values[:0])
        for index, layer in zoo_memory.layers.items()
    }
    provenance = replace(zoo_memory.provenance, key=zoo_memory.provenance.key[:0])
    with attach(zoo_olmoe, replace(zoo_memory, layers=layers, provenance=provenance)) as routing:
        assert trace(zoo_olmoe, routing, prompt) == {}


def test_what_cannot_be_traced_is_told(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory) as routing:
        with pytest.raises(ConfigError, match=r"got \[9\]"):
            trace(zoo_olmoe, routing, prompt[0])
        with pytest.raises(AttachError, match="the model that the memory is attached to"):
            trace(family("olmoe"), routing, prompt)
    with pytest.raises(AttachError, match="The memory is detached"):
        trace(zoo_olmoe, routing, prompt)


def test_in_bfloat16(zoo_tokenizer: object) -> None:
    model = family("olmoe").to(torch.bfloat16)
    memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    ids = encode(zoo_tokenizer, make_texts(1, seed=8)[0])
    with attach(model, memory, RoutingConfig(k=2)) as routing:
        layer = trace(model, routing, ids)[0]
    assert layer.rows.dtype == layer.before.dtype == layer.after.dtype == torch.int64
    assert layer.squared_distance.dtype == layer.confidence.dtype == torch.float32


def test_a_memory_is_set_aside_in_one_thread_alone(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    def run() -> Tensor:
        with torch.no_grad():
            return zoo_olmoe(prompt, use_cache=False).logits

    alone, chosen = run(), experts(zoo_olmoe, prompt)
    seen: dict[int, Tensor] = {}
    with attach(zoo_olmoe, zoo_memory) as routing:
        # The first run of all: nothing was recalled, and that is no fault of the model.
        with routing.set_aside(seen.__setitem__), ThreadPoolExecutor(1) as other:
            assert torch.equal(run(), alone)
            assert {layer.tokens for layer in routing.stats().values()} == {0}
            with_memory = other.submit(run).result()
        assert not torch.equal(with_memory, alone)
        assert torch.equal(run(), with_memory)
        assert {layer.calls for layer in routing.stats().values()} == {2}
        with pytest.raises(ValueError, match="broken"), routing.set_aside(seen.__setitem__):
            raise ValueError("broken")
        assert torch.equal(run(), with_memory)
    assert all(torch.equal(seen[layer], expected) for layer, expected in enumerate(chosen))
    with attach(zoo_olmoe, zoo_memory) as routing, routing.set_aside(seen.__setitem__):
        run()  # detaching does not complain that no router was called
