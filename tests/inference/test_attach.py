"""A memory on a model: right in every way a model is run, and gone without a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.near_ties import assert_no_near_ties
from helpers.zoo import BUILD, TEXTS, encode, family, make_texts
from knn_moe import RoutingConfig, RoutingMemory, attach, build_memory, find_routers
from knn_moe.config import LayerRouting
from knn_moe.errors import (
    ConfigError,
    MemoryMismatchError,
)


def greedy_by_hand(model: nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        with torch.no_grad():
            following = model(ids, use_cache=False).logits[:, -1].argmax(dim=-1, keepdim=True)
        ids = torch.cat([ids, following], dim=1)
    return ids


def generate(model: PreTrainedModel, ids: torch.Tensor, **options: object) -> torch.Tensor:
    mask = options.pop("attention_mask", torch.ones_like(ids))
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(ids, attention_mask=mask, **settings)


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_repeated_full_passes(
    name: str, cache: str, zoo_tokenizer: object, prompt: torch.Tensor
) -> None:
    model = family(name)
    base = greedy_by_hand(model, prompt, 8)
    with attach(model, build_memory(model, zoo_tokenizer, TEXTS, BUILD), RoutingConfig(k=2)):
        expected = greedy_by_hand(model, prompt, 8)
        assert torch.equal(generate(model, prompt, cache_implementation=cache), expected)
    assert not torch.equal(expected, base)
    assert torch.equal(generate(model, prompt), base)


def test_sampling_and_beams(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    def sample() -> torch.Tensor:
        torch.manual_seed(3)
        return generate(zoo_olmoe, prompt, do_sample=True, top_k=0)

    base, base_beams = sample(), generate(zoo_olmoe, prompt, num_beams=3)
    with attach(zoo_olmoe, zoo_memory):
        with_memory = sample()
        assert torch.equal(with_memory, sample())
        assert not torch.equal(with_memory, base)
        beams = generate(zoo_olmoe, prompt, num_beams=3)
        assert beams.shape == base_beams.shape
        scores = [_likelihood(zoo_olmoe, row) for row in (beams, generate(zoo_olmoe, prompt))]
        assert scores[0] >= scores[1] - 1e-4  # a beam is at least as likely as the greedy path


def _likelihood(model: nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        log = model(ids, use_cache=False).logits.log_softmax(dim=-1)
    return float(log[0, 8:-1].gather(1, ids[0, 9:, None]).sum())


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_rows_one_by_one(
    side: str, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, zoo_tokenizer: object
) -> None:
    rows = [encode(zoo_tokenizer, text) for text in make_texts(3, seed=6)]
    for row in rows:
        assert_no_near_ties(zoo_olmoe, zoo_memory, row, RoutingConfig(k=3))
    longest = max(row.shape[1] for row in rows)
    padded = torch.zeros(3, longest, dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for line, row in enumerate(rows):
        place = slice(longest - row.shape[1], None) if side == "left" else slice(row.shape[1])
        padded[line, place] = row[0]
        mask[line, place] = 1
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=3)) as routing:
        together = zoo_olmoe(padded, attention_mask=mask, use_cache=False).logits
        in_batch = routing.stats()
        for line, row in enumerate(rows):
            alone = zoo_olmoe(row, use_cache=False).logits[0]
            torch.testing.assert_close(
                together[line][mask[line].bool()], alone, rtol=1e-4, atol=1e-4
            )
        if side == "left":
            batched = generate(zoo_olmoe, padded, attention_mask=mask)
            for line, row in enumerate(rows):
                assert torch.equal(
                    batched[line, longest:], generate(zoo_olmoe, row)[0, row.shape[1] :]
                )
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=3)) as routing:
        for row in rows:
            zoo_olmoe(row, use_cache=False)
        for layer, alone in routing.stats().items():
            assert in_batch[layer].tokens == alone.tokens == int(mask.sum())
            assert in_batch[layer].changed == alone.changed
            assert in_batch[layer].mean_confidence == pytest.approx(alone.mean_confidence, rel=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padding_is_not_counted_while_generating(
    cache: str, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    ids = torch.randint(3, 128, (2, 6))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with attach(zoo_olmoe, zoo_memory) as routing:
        generate(zoo_olmoe, ids, attention_mask=mask, max_new_tokens=3, cache_implementation=cache)
        # 8 real tokens in the prompt, then two more steps of two rows.
        assert {stats.tokens for stats in routing.stats().values()} == {8 + 4}
        assert {stats.calls for stats in routing.stats().values()} == {3}


def test_stats_count_what_changed(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    base = zoo_olmoe(prompt, output_router_logits=True, use_cache=False).router_logits
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(layers=(0,))) as routing:
        used = zoo_olmoe(prompt, output_router_logits=True, use_cache=False).router_logits
        stats = routing.stats()
    assert set(stats) == {0}
    before, after = (logits[0].topk(2).indices.sort().values for logits in (base, used))
    assert stats[0].changed == pytest.approx(float((before != after).any(dim=-1).float().mean()))
    assert 0 < stats[0].changed < 1
    assert 0 < stats[0].mean_confidence < 1
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(stats=False)) as routing:
        zoo_olmoe(prompt, use_cache=False)
        assert routing.stats()[0].changed is None


def test_recorded_router_logits_are_those_used(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    base = zoo_olmoe(prompt, output_router_logits=True, use_cache=False)
    with attach(zoo_olmoe, zoo_memory):
        recorded = zoo_olmoe(prompt, output_router_logits=True, use_cache=False)
        plain = zoo_olmoe(prompt, use_cache=False)
    assert torch.equal(recorded.logits, plain.logits)
    assert not torch.equal(recorded.router_logits[0], base.router_logits[0])
    by_hand = _mixed_by_hand(zoo_memory, base.router_logits[0])
    torch.testing.assert_close(recorded.router_logits[0], by_hand)


def test_each_layer_has_its_kernels(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    """Weights, λ and its factor have a width each; a factor of 0 leaves a layer out."""
    base = zoo_olmoe(prompt, output_router_logits=True, use_cache=False).router_logits
    own = LayerRouting(layer=0, gamma_scale=2.0, confidence_scale=0.3, confidence_factor=0.8)
    config = RoutingConfig(k=3, confidence_factor=0.0, per_layer=(own,))
    with attach(zoo_olmoe, zoo_memory, config) as routing:
        mixed = zoo_olmoe(prompt, output_router_logits=True, use_cache=False).router_logits
        assert list(routing.stats()) == [0]
    x, layer = _router_inputs(), zoo_memory.layers[0]
    distance = torch.cdist(x.double(), layer.keys.double()).square()
    nearest, rows = torch.topk(distance, 3, dim=-1, largest=False)
    weight = torch.softmax(-2.0 * layer.gamma * nearest, dim=-1)
    proposal = (weight[:, :, None] * layer.values[rows].double()).sum(dim=1)
    confidence_factor = 0.8 * torch.exp(-0.3 * layer.gamma * nearest).mean(dim=-1, keepdim=True)
    expected = (1 - confidence_factor) * base[0].double() + confidence_factor * proposal
    torch.testing.assert_close(mixed[0], expected.float())
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(confidence_factor=0.0)):
        silent = zoo_olmoe(prompt, output_router_logits=True, use_cache=False).router_logits
    assert all(torch.equal(one, two) for one, two in zip(silent, base, strict=True))


def _router_inputs() -> torch.Tensor:
    """Of layer 0, of the model alone. Shape [T, d]."""
    model = family("olmoe")
    seen = []
    router = find_routers(model)[0]
    router.module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(encode_prompt(), use_cache=False)
    return seen[0].reshape(-1, router.hidden_size)


def _mixed_by_hand(memory: RoutingMemory, logits: torch.Tensor) -> torch.Tensor:
    """Layer 0 once more, from the model's own unmixed router input."""
    x, layer = _router_inputs(), memory.layers[0]
    distance = torch.cdist(x.double(), layer.keys.double()).square()
    nearest, row = distance.min(dim=-1)
    weight = torch.exp(-layer.gamma * nearest)[:, None]
    mixed = (1 - weight) * logits.double() + weight * layer.values[row].double()
    return mixed.float()


def encode_prompt() -> torch.Tensor:
    text = make_texts(1, seed=5, shortest=9, longest=9)[0]
    return torch.tensor([[int(word) for word in text.split()]])


def test_bfloat16(zoo_tokenizer: object, prompt: torch.Tensor) -> None:
    model = family("olmoe").to(torch.bfloat16)
    base = model(prompt, use_cache=False).logits
    memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    assert {layer.keys.dtype for layer in memory.layers.values()} == {torch.bfloat16}
    assert {layer.values.dtype for layer in memory.layers.values()} == {torch.float32}
    with attach(model, memory, RoutingConfig(gamma=1e30)):
        assert torch.equal(model(prompt, use_cache=False).logits, base)
    with attach(model, memory):
        logits = model(prompt, use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    assert not torch.equal(logits, base)
    with attach(family("olmoe"), memory):  # the same checkpoint in another precision is the model
        pass


@pytest.mark.slow
def test_compiled(
    zoo_olmoe: PreTrainedModel,
    zoo_memory: RoutingMemory,
    prompt: torch.Tensor,
    compiled_state: None,
) -> None:
    assert_no_near_ties(zoo_olmoe, zoo_memory, prompt, RoutingConfig(k=2))
    with torch.no_grad():
        base = zoo_olmoe(prompt, use_cache=False).logits
        compiled = torch.compile(zoo_olmoe, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(prompt, use_cache=False).logits, base)
        with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=2)) as routing:
            expected = zoo_olmoe(prompt, use_cache=False).logits
            tokens = routing.stats()[0].tokens
            for _ in range(3):
                result = compiled(prompt, use_cache=False).logits
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            assert routing.stats()[0].tokens == 4 * tokens
            assert routing.stats()[0].calls == 4
        torch.testing.assert_close(compiled(prompt, use_cache=False).logits, base)


@pytest.mark.slow
def test_a_compiled_model_does_not_recompile_at_each_call(
    zoo_olmoe: PreTrainedModel,
    zoo_memory: RoutingMemory,
    prompt: torch.Tensor,
    compiled_state: None,
) -> None:
    compilations = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(zoo_olmoe, backend=count, fullgraph=True)
    with attach(zoo_olmoe, zoo_memory), torch.no_grad():
        for _ in range(3):
            compiled(prompt, use_cache=False)
        assert len(compilations) == 1
        for length in range(12, 24):
            compiled(torch.randint(3, 128, (1, length)), use_cache=False)
    assert len(compilations) == 2  # one for this length, one for any


def test_a_peft_model(zoo_memory: RoutingMemory, prompt: torch.Tensor) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"], lora_dropout=0
    )
    wrapped = get_peft_model(family("olmoe"), config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    wrapped.eval()
    assert [router.layer for router in find_routers(wrapped)] == [0, 1]
    base = wrapped(prompt, use_cache=False).logits
    with attach(wrapped, zoo_memory) as routing:
        expected = greedy_by_hand(wrapped, prompt, 4)
        tokens = wrapped.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
        assert torch.equal(tokens, expected)
        assert routing.stats()[0].calls > 0
        assert not torch.equal(wrapped(prompt, use_cache=False).logits, base)
    assert torch.equal(wrapped(prompt, use_cache=False).logits, base)


def test_building_on_a_peft_model(zoo_tokenizer: object) -> None:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(family("olmoe"), LoraConfig(r=4, target_modules=["q_proj"]))
    trainable = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    built = build_memory(wrapped, zoo_tokenizer, TEXTS, BUILD)
    assert [name for name, p in wrapped.named_parameters() if p.requires_grad] == trainable
    plain = build_memory(family("olmoe"), zoo_tokenizer, TEXTS, BUILD)
    # An adapter that is still zero changes nothing.
    torch.testing.assert_close(built.layers[1].values, plain.layers[1].values)


def test_offloaded_by_device_map(
    tmp_path: Path, zoo_memory: RoutingMemory, zoo_tokenizer: object, prompt: torch.Tensor
) -> None:
    family("olmoe").save_pretrained(tmp_path / "model")
    whole = family("olmoe")
    places = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert find_routers(model)[1].weight.is_meta
    with attach(whole, zoo_memory), attach(model, zoo_memory):
        torch.testing.assert_close(
            model(prompt, use_cache=False).logits, whole(prompt, use_cache=False).logits
        )


def test_building_on_an_offloaded_model(tmp_path: Path, zoo_tokenizer: object) -> None:
    family("olmoe").save_pretrained(tmp_path / "model")
    places = {"model.layers.1": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    offloaded = {"model.embed_tokens": "disk", "model.layers.0": "disk", "lm_head": "disk"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map={**places, **offloaded}, offload_folder=tmp_path / "offload"
    )
    built = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    whole = build_memory(family("olmoe"), zoo_tokenizer, TEXTS, BUILD)
    torch.testing.assert_close(built.layers[1].values, whole.layers[1].values)
    assert built.base_model.fingerprint == whole.base_model.fingerprint


def test_several_threads_at_once(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from torch.overrides import _len_torch_function_stack

    def run(_: int) -> tuple[torch.Tensor, int]:
        with torch.no_grad():
            logits = zoo_olmoe(prompt, use_cache=False).logits
        return logits, _len_torch_function_stack()

    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=2)), ThreadPoolExecutor(4) as pool:
        expected, _ = run(0)
        for logits, modes in pool.map(run, range(40)):
            torch.testing.assert_close(logits, expected)
            assert modes == 0


def test_chosen_layers_only(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    base = zoo_olmoe(prompt, output_router_logits=True, use_cache=False).router_logits
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(layers=(1,))):
        mixed = zoo_olmoe(prompt, output_router_logits=True, use_cache=False).router_logits
    assert torch.equal(mixed[0], base[0])
    assert not torch.equal(mixed[1], base[1])
    with pytest.raises(ConfigError, match=r"no layer 7\. It has: \[0, 1\]"):
        attach(zoo_olmoe, zoo_memory, RoutingConfig(layers=(7,)))
    assert RoutingConfig(layers=(1, 1)).layers == (1,)
    for wrong in ((), 5, ("one",)):
        with pytest.raises(ConfigError, match="layers must name layers by number"):
            RoutingConfig(layers=wrong)


@pytest.mark.parametrize("similarity", ["rbf", "rbf-unit", "cosine"])
def test_every_similarity_has_an_effect(
    similarity: str, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    base = zoo_olmoe(prompt, use_cache=False).logits
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(similarity=similarity, k=4)) as routing:
        logits = zoo_olmoe(prompt, use_cache=False).logits
        assert 0 < routing.stats()[0].mean_confidence <= 1
    assert logits.isfinite().all()
    assert not torch.equal(logits, base)


def test_more_neighbours_than_cases(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, prompt: torch.Tensor
) -> None:
    memory = build_memory(zoo_olmoe, zoo_tokenizer, ["3 4 5"])
    with attach(zoo_olmoe, memory, RoutingConfig(k=50)):
        assert zoo_olmoe(prompt, use_cache=False).logits.isfinite().all()


def test_two_models_at_once(
    zoo_memory: RoutingMemory, zoo_tokenizer: object, prompt: torch.Tensor
) -> None:
    one, other = family("olmoe"), family("gpt_oss")
    second = build_memory(other, zoo_tokenizer, TEXTS, BUILD)
    with attach(one, zoo_memory):
        alone = one(prompt, use_cache=False).logits
    with attach(one, zoo_memory), attach(other, second):
        other(prompt, use_cache=False)
        assert torch.equal(one(prompt, use_cache=False).logits, alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_memory_belongs_to_its_model_in_other_precisions(
    dtype: torch.dtype, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    zoo_olmoe.to(dtype)
    with torch.no_grad(), attach(zoo_olmoe, zoo_memory):
        assert zoo_olmoe(prompt, use_cache=False).logits.isfinite().all()
    with torch.no_grad():
        find_routers(zoo_olmoe)[1].weight.mul_(1.1)
    with pytest.raises(MemoryMismatchError):
        attach(zoo_olmoe, zoo_memory)
