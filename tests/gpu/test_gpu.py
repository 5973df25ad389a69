"""On a GPU: the same memory, the same mixing, inside compiled graphs too."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from helpers.zoo import family, make_texts
from knn_moe import BuildConfig, RoutingConfig, attach, build_memory
from knn_moe.routers.grouped_experts import NAME, use_grouped_experts

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # What the compiler has to say of the GPU and of its own passes.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
TEXTS = make_texts(12)
BUILD = BuildConfig(learning_rate=2.0, batch_tokens=64)


@pytest.fixture(params=["olmoe", "qwen3_moe", "gpt_oss"])
def family_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return family(request.param)


def test_a_memory_built_there_is_the_one_built_here(
    family_model: PreTrainedModel, zoo_tokenizer: object
) -> None:
    here = build_memory(family_model, zoo_tokenizer, TEXTS, BUILD)
    with use_grouped_experts(family_model.cuda()):
        assert family_model.config._experts_implementation == NAME
    there = build_memory(family_model, zoo_tokenizer, TEXTS, BUILD)
    for index, layer in here.layers.items():
        torch.testing.assert_close(there.layers[index].keys, layer.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.layers[index].values, layer.values, rtol=1e-3, atol=1e-3)
        assert there.layers[index].gamma == pytest.approx(layer.gamma, rel=1e-3)


def test_building_experts_in_bf16(zoo_tokenizer: object) -> None:
    model = family("olmoe").to("cuda", torch.bfloat16)
    ids = torch.randint(3, 128, (4, 16), device="cuda")
    table = model.get_input_embeddings().weight
    results = []
    for context in (torch.enable_grad(), use_grouped_experts(model)):
        with context:
            logits = model(ids, use_cache=False).logits.float()
            results.append((logits, torch.autograd.grad(logits.square().mean(), table)[0].float()))
    for own, ours in zip(*results, strict=True):
        assert (own - ours).norm() < 0.02 * own.norm()


def test_mixing_there_is_mixing_here(family_model: PreTrainedModel, zoo_tokenizer: object) -> None:
    memory = build_memory(family_model, zoo_tokenizer, TEXTS, BUILD)
    ids = torch.randint(3, 128, (2, 11))
    config = RoutingConfig(k=3)
    with attach(family_model, memory, config), torch.no_grad():
        here = family_model(ids, use_cache=False).logits
    with attach(family_model.cuda(), memory, config) as routing, torch.no_grad():
        there = family_model(ids.cuda(), use_cache=False).logits
        assert routing.stats()[0].tokens == 22
    torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-3)


def test_cuda_graphs(zoo_tokenizer: object) -> None:
    """Compiled with CUDA graphs: the same numbers, and no graph is given up for our sake.

    In bf16: in fp32 the models' own grouped experts cannot be captured.
    """
    from torch._dynamo.utils import counters

    model = family("olmoe").to("cuda", torch.bfloat16)
    memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    batches = [torch.randint(3, 128, (2, 11), device="cuda") for _ in range(4)]
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad(), attach(model, memory, RoutingConfig(k=2)) as routing:
        expected = [model(ids, use_cache=False).logits for ids in batches]
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for ids, logits in zip(batches, expected, strict=True):
            result = compiled(ids, use_cache=False).logits.clone()
            assert (result - logits).norm() < 5e-2 * logits.norm()
        assert routing.stats()[0].calls == 8
        assert routing.stats()[0].tokens == 8 * 22
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_generating_with_a_static_cache(
    family_model: PreTrainedModel, zoo_tokenizer: object
) -> None:
    family_model = family_model.cuda()
    memory = build_memory(family_model, zoo_tokenizer, TEXTS, BUILD)
    ids = torch.randint(3, 128, (1, 9), device="cuda")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(ids)
    base = family_model.generate(ids, attention_mask=mask, cache_implementation="static", **options)
    with attach(family_model, memory):
        dynamic = family_model.generate(ids, attention_mask=mask, **options)
        static = family_model.generate(
            ids, attention_mask=mask, cache_implementation="static", **options
        )
    again = family_model.generate(
        ids, attention_mask=mask, cache_implementation="static", **options
    )
    assert torch.equal(static, dynamic)
    assert torch.equal(again, base)
    assert not torch.equal(static, base)
