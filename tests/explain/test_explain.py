"""Explanations against traces, and against what an ordinary run counts, on every index."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.indexed import KINDS, MANY, uneven
from helpers.zoo import BUILD, TEXTS, encode, family, make_texts
from knn_moe import HeadConfig, RoutingConfig, RoutingMemory, attach, build_memory, compress
from knn_moe.config import LayerRouting
from knn_moe.errors import AttachError, ConfigError
from knn_moe.explain.explanation import ExplainedToken, Explanation, RecalledCase
from knn_moe.explain.trace import trace

K = 3


def test_it_says_what_the_trace_has(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, zoo_tokenizer: Any, prompt: Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=K)) as routing:
        traced = trace(zoo_olmoe, routing, prompt)
        explanation = routing.explain(prompt, tokenizer=zoo_tokenizer)
    source = zoo_memory.provenance
    assert explanation.layers == tuple(traced)
    assert [token.id for token in explanation.tokens] == prompt[0].tolist()
    for position, token in enumerate(explanation.tokens):
        for effect, (layer, found) in zip(token.effects, traced.items(), strict=True):
            assert (effect.layer, effect.confidence) == (layer, float(found.confidence[position]))
            assert effect.experts == tuple(found.after[position].tolist())
            assert (tuple(effect.experts_in), tuple(effect.experts_out)) == found.swapped(position)
            for expert, change in {**effect.experts_in, **effect.experts_out}.items():
                assert change == float(found.change[position, expert])
            assert [case.row for case in effect.cases] == found.rows[position].tolist()
            assert [case.weight for case in effect.cases] == found.weight[position].tolist()
            assert sum(case.weight for case in effect.cases) == pytest.approx(1, abs=1e-5)
            usual = zoo_memory.layers[layer].gamma ** -0.5
            for number, case in enumerate(effect.cases):
                assert case.squared_distance == float(found.squared_distance[position, number])
                assert case.distance * usual == pytest.approx(case.squared_distance**0.5, rel=1e-6)
                ids, place = source.context(case.row, before=10)
                words = TEXTS[case.example].split()
                assert words[int(source.position[case.row])] == str(ids[place])
                assert case.token.strip() == str(ids[place])
                assert (case.before + case.token + case.after).split() == [str(one) for one in ids]
    assert any(effect.changed for token in explanation.tokens for effect in token.effects)


@pytest.mark.parametrize("head", [None, HeadConfig(k=4, weight=0.3, keys="router")])
def test_beside_the_memory_is_what_the_model_does_alone(
    head: HeadConfig | None,
    zoo_olmoe: PreTrainedModel,
    zoo_memory: RoutingMemory,
    prompt: Tensor,
    zoo_tokenizer: Any,
) -> None:
    def run() -> tuple[Tensor, list[Tensor]]:
        """The probabilities of next tokens, and the experts of each layer."""
        with torch.no_grad():
            found = zoo_olmoe(prompt, use_cache=False, output_router_logits=True)
        experts = [one.topk(2).indices.sort().values for one in found.router_logits]
        return found.logits[0].float().softmax(dim=-1), experts

    alone, experts_alone = run()
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=K, head=head)) as routing:
        with_memory, _ = run()
        explanation = routing.explain(prompt, tokenizer=zoo_tokenizer)
        short = routing.explain(prompt, tokenizer=zoo_tokenizer, last=2)
        assert torch.equal(run()[0], with_memory)
    assert torch.equal(run()[0], alone)
    assert short.tokens == explanation.tokens[-2:]
    following = [*prompt[0, 1:].tolist(), None]
    for position, (token, after) in enumerate(zip(explanation.tokens, following, strict=True)):
        for effect, experts in zip(token.effects, experts_alone, strict=True):
            assert effect.experts_alone == tuple(experts[position].tolist())
        assert (None if token.following is None else token.following.id) == after
        known = [token.following] if token.following else []
        for one in (*token.predictions, *known):
            assert one.alone == pytest.approx(float(alone[position, one.id]), rel=1e-4)
            assert one.with_memory == pytest.approx(float(with_memory[position, one.id]), rel=1e-4)
            assert one.text.strip() == str(one.id)
        shown = {one.id for one in token.predictions}
        assert shown == {
            *alone[position].topk(5).indices.tolist(),
            *with_memory[position].topk(5).indices.tolist(),
        }
    assert not torch.allclose(alone, with_memory, atol=1e-4)


def nearest(token: ExplainedToken) -> RecalledCase:
    return token.effects[0].cases[0]


def cases_of(explanation: Explanation) -> list[RecalledCase]:
    effects = [effect for token in explanation.tokens for effect in token.effects]
    return [case for effect in effects for case in effect.cases]


@pytest.fixture(scope="module")
def many(zoo_tokenizer: Any) -> RoutingMemory:
    return build_memory(uneven(), zoo_tokenizer, MANY, BUILD)


def explain_and_check_counts(
    model: PreTrainedModel, memory: RoutingMemory, config: RoutingConfig | None, ids: Tensor
) -> Explanation:
    """Explain what was read, and check λ and changes against the counts of an ordinary run."""
    with attach(model, memory, config) as routing:
        with torch.no_grad():
            model(ids, use_cache=False)
        counted = routing.stats()
        explanation = routing.explain()
        assert routing.stats() == counted  # explaining does not count
    assert explanation.layers == tuple(counted)
    assert [token.id for token in explanation.tokens] == ids.flatten().tolist()
    for number, stats in enumerate(counted.values()):
        effects = [token.effects[number] for token in explanation.tokens]
        mean = sum(effect.confidence for effect in effects) / len(effects)
        assert mean == pytest.approx(stats.mean_confidence, rel=1e-3, abs=1e-5)
        changed = sum(effect.changed for effect in effects) / len(effects)
        assert changed == pytest.approx(stats.changed)
        assert all(effect.cases for effect in effects)
        cases = [case for effect in effects for case in effect.cases]
        assert all(0 <= case.row < len(memory) for case in cases)
        assert all(case.squared_distance >= 0 for case in cases)
    return explanation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "similarity"),
    [*((kind, "rbf") for kind in KINDS), ("fast", "rbf-unit"), ("fast", "cosine")],
)
def test_every_index_and_similarity(
    kind: str, similarity: str, many: RoutingMemory, prompt: Tensor
) -> None:
    config = RoutingConfig(k=K, similarity=similarity, index=KINDS[kind][0])
    explanation = explain_and_check_counts(uneven(), many, config, prompt)
    exact = explain_and_check_counts(uneven(), many, replace(config, index=None), prompt)
    pairs = zip(explanation.tokens, exact.tokens, strict=True)
    same = [nearest(one).row == nearest(other).row for one, other in pairs]
    assert sum(same) >= len(same) * 0.6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fast", "ivfpq"])
def test_compressed_memories(
    kind: str, many: RoutingMemory, prompt: Tensor, tmp_path: Path
) -> None:
    small = compress(many, KINDS[kind][0], tmp_path / "small")
    explanation = explain_and_check_counts(uneven(), small, None, prompt)
    assert all(case.token for case in cases_of(explanation))


@pytest.mark.parametrize("similarity", ["rbf", "rbf-unit"])
def test_a_distance_of_one_is_usual(similarity: str, many: RoutingMemory, prompt: Tensor) -> None:
    """λ of one neighbour is exp(-d²) by that measure, whatever γ the routing takes."""
    with attach(uneven_model := uneven(), many, RoutingConfig(similarity=similarity)) as routing:
        explanation = routing.explain(prompt)
    for effect in (effect for token in explanation.tokens for effect in token.effects):
        (case,) = effect.cases
        assert effect.confidence == pytest.approx(math.exp(-(case.distance**2)), rel=1e-3, abs=1e-5)
    wide = RoutingConfig(similarity=similarity, gamma=1e-6)
    with attach(uneven_model, many, wide) as routing:
        first = routing.explain(prompt).tokens[0]
    assert nearest(first).distance == pytest.approx(
        nearest(explanation.tokens[0]).distance, rel=1e-3
    )


def test_layers_without_trust_are_left_out(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    config = RoutingConfig(per_layer=(LayerRouting(layer=0, confidence_factor=0.0),))
    explanation = explain_and_check_counts(zoo_olmoe, zoo_memory, config, prompt)
    assert explanation.layers == (1,)
    with pytest.raises(ConfigError, match=r"attached to layer 0. Attached are: \[1\]"):
        explanation.only([0])
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(confidence_factor=0.0)) as routing:
        silent = routing.explain(prompt)
    assert silent.layers == ()
    assert [token.effects for token in silent.tokens] == [()] * 9
    assert [(token.confidence, token.strongest) for token in silent.tokens] == [(0, None)] * 9
    assert repr(silent) == "Explanation(9 tokens × 0 layers, mean λ 0.00)"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(
    side: str, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, zoo_tokenizer: Any
) -> None:
    texts = make_texts(3, seed=11)
    assert len({len(text.split()) for text in texts}) > 1
    zoo_tokenizer.padding_side = side
    batch = zoo_tokenizer(texts, return_tensors="pt", padding=True)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with attach(zoo_olmoe, zoo_memory) as routing:
        explanation = routing.explain(ids, mask, tokenizer=zoo_tokenizer)
        with torch.no_grad():
            zoo_olmoe(ids, attention_mask=mask, use_cache=False)
        again = routing.explain(tokenizer=zoo_tokenizer)
        alone = [routing.explain(text, tokenizer=zoo_tokenizer) for text in texts]
        assert_same(explanation, again)
        for sequence, text, single in zip(explanation.sequences, texts, alone, strict=True):
            assert " ".join(str(token.id) for token in sequence) == text
            assert_same(Explanation(explanation.layers, (sequence,)), single)
        assert "sequence 2 of 3" in str(explanation)


def assert_same(one: Explanation, other: Explanation) -> None:
    assert json.dumps(one.to_dict()) == json.dumps(other.to_dict())


def test_only_the_last_tokens(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor, zoo_tokenizer: Any
) -> None:
    with attach(zoo_olmoe, zoo_memory) as routing:
        whole = routing.explain(prompt, tokenizer=zoo_tokenizer)
        assert routing.explain(prompt, tokenizer=zoo_tokenizer, last=2).tokens == whole.tokens[-2:]
        assert routing.explain(prompt[0], tokenizer=zoo_tokenizer, last=99).tokens == whole.tokens
        with pytest.raises(ConfigError, match="last must be at least 1, got 0"):
            routing.explain(prompt, last=0)


def test_what_cannot_be_explained_is_told(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor, zoo_tokenizer: Any
) -> None:
    with attach(zoo_olmoe, zoo_memory) as routing:
        for wrong, seen in ((prompt[None], r"\[1, 1, 9\]"), (prompt.float(), r"\[1, 9\]")):
            with pytest.raises(ConfigError, match=f"got {seen}"):
                routing.explain(wrong)
        with pytest.raises(ConfigError, match="got list"):
            routing.explain([3, 4])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="needs its tokenizer"):
            routing.explain("3 4")
        with pytest.raises(ConfigError, match=r"got \[0\]"):
            routing.explain("", tokenizer=zoo_tokenizer)
        with pytest.raises(ConfigError, match=r"shape \[1, 9\], got \[1, 8\]"):
            routing.explain(prompt, torch.ones(1, 8))
    with pytest.raises(AttachError, match="The memory is detached"):
        routing.explain(prompt)


def test_a_failed_run_leaves_everything_as_it_was(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    def fail(module: object, args: object) -> None:
        raise ValueError

    with attach(zoo_olmoe, zoo_memory) as routing, torch.no_grad():
        before = zoo_olmoe(prompt, use_cache=False).logits
        counted = routing.stats()
        broken = zoo_olmoe.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(ValueError):  # noqa: PT011
            routing.explain()
        broken.remove()
        assert routing.stats() == counted
        assert len(routing.explain().tokens) == 9
        assert torch.equal(zoo_olmoe(prompt, use_cache=False).logits, before)


def test_a_space_that_a_tokenizer_drops_is_kept(zoo_tokenizer: Any) -> None:
    """The fixture's tokenizer says "4" of the second token of "3 4", and " 4" is what was read."""
    model = family("olmoe")
    memory = build_memory(model, zoo_tokenizer, ["3 4 5 6"], BUILD)
    with attach(model, memory) as routing:
        explanation = routing.explain(encode(zoo_tokenizer, "3 4 5"), tokenizer=zoo_tokenizer)
        numbers = routing.explain(encode(zoo_tokenizer, "3 4 5"))
    assert [token.text for token in explanation.tokens] == ["3", " 4", " 5"]
    assert [token.text for token in numbers.tokens] == [" 3", " 4", " 5"]
    case = nearest(explanation.tokens[1])
    assert (case.before, case.token, case.after) == ("3", " 4", " 5")


def test_tokens_that_share_a_character(tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any) -> None:
    """The character belongs to the token that completes it, in texts and in recalled cases."""
    text = "It’s 我们 🙂 and don’t go."
    memory = build_memory(tiny_olmoe, tiny_tokenizer, [text], replace(BUILD, max_length=64))
    with attach(tiny_olmoe, memory) as routing:
        explanation = routing.explain(text, tokenizer=tiny_tokenizer)
    assert "".join(token.text for token in explanation.tokens) == text
    assert "" in [token.text for token in explanation.tokens]
    assert all(case.before + case.token + case.after in text for case in cases_of(explanation))
    assert "\N{REPLACEMENT CHARACTER}" not in str(explanation)
