"""What the model read last, for `explain()`: the very tokens, or why they are not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from helpers.zoo import BUILD, TEXTS, family, make_texts
from knn_moe import RoutingMemory, attach, build_memory
from knn_moe.errors import NothingReadError
from knn_moe.inference.attach import Routing


def read(routing: Routing) -> list[list[int]]:
    """The ids that `explain()` explains."""
    return [[token.id for token in sequence] for sequence in routing.explain().sequences]


def generate(model: PreTrainedModel, ids: Tensor, **settings: Any) -> Tensor:
    settings = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, **settings}
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"do_sample": True},
        {"prefill_chunk_size": 4},
        {"prompt_lookup_num_tokens": 3},  # tokens that are guessed, read and taken back
    ],
)
def test_what_was_generated(
    settings: dict[str, Any], zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    repeated = torch.cat([prompt, prompt, prompt[:, :3]], dim=1)
    with attach(zoo_olmoe, zoo_memory) as routing:
        generate(zoo_olmoe, prompt.flip(1))
        output = generate(zoo_olmoe, repeated, max_new_tokens=7, **settings)
        expected = output[0].tolist()
        (found,) = read(routing)
        # The last token is not read, unless it was guessed.
        assert found in (expected[:-1], expected)
        assert read(routing) == [found]
        by_hand = routing.explain(torch.tensor([found])).to_dict()
        assert routing.explain().to_dict() == by_hand


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next", "jamba", "minimax", "llama4_text"])
def test_caches_of_other_kinds(name: str, zoo_tokenizer: Any, prompt: Tensor) -> None:
    """Sliding windows, linear attention, state spaces, chunks."""
    model = family(name)
    with attach(model, build_memory(model, zoo_tokenizer, TEXTS[:4], BUILD)) as routing:
        output = generate(model, prompt)
        assert read(routing) == output[:, :-1].tolist()


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_padded_batch_and_rows_that_end(
    cache: str | None, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, zoo_tokenizer: Any
) -> None:
    zoo_tokenizer.padding_side = "left"
    batch = zoo_tokenizer(make_texts(3, seed=4), return_tensors="pt", padding=True)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with attach(zoo_olmoe, zoo_memory) as routing:
        free = generate(zoo_olmoe, ids, attention_mask=mask, cache_implementation=cache)
        width = ids.shape[1]
        assert read(routing) == [
            row[kept.bool()].tolist() + new[:-1].tolist()
            for row, kept, new in zip(ids, mask, free[:, width:], strict=True)
        ]
        end = int(free[0, width + 1])  # after two tokens the first row is done
        zoo_olmoe.generation_config.eos_token_id = end
        ended = generate(zoo_olmoe, ids, attention_mask=mask, cache_implementation=cache)
        found = read(routing)
    assert ended[0, width + 2 :].tolist() == [0] * (ended.shape[1] - width - 2)
    real = ids[0][mask[0].bool()].tolist()
    assert found[0] == real + ended[0, width : width + 2].tolist()
    assert len({len(row) for row in found}) > 1


def test_a_loop_of_ones_own(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    """The cache the model made itself, one given, one cut short, and ids changed in place."""
    new = torch.tensor([[7]])
    with attach(zoo_olmoe, zoo_memory) as routing, torch.inference_mode():
        cache = zoo_olmoe(prompt, use_cache=True).past_key_values
        zoo_olmoe(new, past_key_values=cache)
        new.fill_(9)
        zoo_olmoe(new, past_key_values=cache)
        assert read(routing) == [[*prompt[0].tolist(), 7, 9]]
        cache.crop(-7)  # of eleven
        zoo_olmoe(torch.tensor([[11, 12]]), past_key_values=cache)
        assert read(routing) == [[*prompt[0, :4].tolist(), 11, 12]]
        fixed = StaticCache(config=zoo_olmoe.config, max_cache_len=16)
        for token in (21, 22, 23):
            zoo_olmoe(torch.tensor([[token]]), past_key_values=fixed)
        assert read(routing) == [[21, 22, 23]]
        fixed.reset()
        zoo_olmoe(torch.tensor([[24]]), past_key_values=fixed)
        zoo_olmoe(torch.tensor([[25]]), past_key_values=fixed)
        assert read(routing) == [[24, 25]]


def two_loops(model: PreTrainedModel, ids: Tensor) -> None:
    one, two = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids, past_key_values=one)
    model(ids.flip(1), past_key_values=two)
    model(ids[:, :1], past_key_values=one)


def with_embeddings(model: PreTrainedModel, ids: Tensor) -> None:
    model(inputs_embeds=model.get_input_embeddings()(ids))


def with_beams(model: PreTrainedModel, ids: Tensor) -> None:
    generate(model, ids, num_beams=3)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda model, ids: None, "read nothing since the memory was attached"),
        (with_embeddings, "inputs_embeds"),
        (with_beams, "as in beam search"),
        (two_loops, "a cache whose tokens were not recorded"),
    ],
)
def test_what_is_not_known_is_told(
    run: Callable[[PreTrainedModel, Tensor], None],
    says: str,
    zoo_olmoe: PreTrainedModel,
    zoo_memory: RoutingMemory,
    prompt: Tensor,
) -> None:
    with attach(zoo_olmoe, zoo_memory) as routing, torch.no_grad():
        run(zoo_olmoe, prompt)
        for _ in range(2):
            with pytest.raises(NothingReadError, match=rf"{says}.*routing.explain\(input_ids\)\.$"):
                routing.explain()
        assert len(routing.explain(prompt).tokens) == 9
        zoo_olmoe(prompt)
        assert read(routing) == prompt.tolist()


def test_a_cache_from_before(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    with torch.no_grad():
        cache = zoo_olmoe(prompt, use_cache=True).past_key_values
        with attach(zoo_olmoe, zoo_memory) as routing:
            zoo_olmoe(prompt[:, :2], past_key_values=cache)
            with pytest.raises(NothingReadError, match="not recorded"):
                routing.explain()


@pytest.mark.slow
def test_a_compiled_model(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor, compiled_state: None
) -> None:
    compilations = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(zoo_olmoe, backend=count, fullgraph=True)
    with attach(zoo_olmoe, zoo_memory) as routing, torch.no_grad():
        expected = routing.explain(prompt).to_dict()
        compiled(prompt, use_cache=False)
        with pytest.raises(NothingReadError, match="1 forward passes ran inside a compiled"):
            routing.explain()
        assert routing.explain(prompt).to_dict() == expected
        zoo_olmoe(prompt, use_cache=False)
        assert routing.explain().to_dict() == expected
        compiled(prompt, use_cache=False)
        compiled(prompt, use_cache=False)
        with pytest.raises(NothingReadError, match="2 forward passes"):
            routing.explain()
        assert {layer.calls for layer in routing.stats().values()} == {4}
    assert len(compilations) == 1
    with attach(compiled, zoo_memory) as routing, torch.no_grad():
        assert routing.explain(prompt).to_dict() == expected


@pytest.mark.slow
def test_a_prompt_read_eagerly_and_compiled_steps(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor, compiled_state: None
) -> None:
    """As `generate` does on a GPU with a static cache."""
    compiled = torch.compile(zoo_olmoe, backend="eager", fullgraph=True)
    with attach(zoo_olmoe, zoo_memory) as routing, torch.no_grad():
        cache = StaticCache(config=zoo_olmoe.config, max_cache_len=16)
        zoo_olmoe(prompt, past_key_values=cache)
        assert read(routing) == prompt.tolist()
        for token in (7, 8):
            compiled(torch.tensor([[token]]), past_key_values=cache)
        with pytest.raises(NothingReadError, match="2 forward passes"):
            routing.explain()


def test_nothing_is_left_behind(zoo_memory: RoutingMemory, prompt: Tensor) -> None:
    """No hook, and no cache kept alive."""
    model = family("olmoe")
    with attach(model, zoo_memory) as routing, torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(prompt, past_key_values=cache)
        held = routing._history._last.state.cache
        assert held is not None
        assert held() is cache
        del cache
        assert held() is None
        assert read(routing) == prompt.tolist()
    assert not any(module._forward_hooks for module in model.modules())
