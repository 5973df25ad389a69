"""Explanations against the same by hand, on every index and similarity, and as text and page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from helpers.html_page import Page
from helpers.indexed import KINDS, MANY, every_kind, every_similarity, uneven
from helpers.near_ties import assert_no_near_ties
from helpers.zoo import BUILD, TEXTS, encode, family, make_texts
from knn_moe import RoutingConfig, RoutingMemory, attach, build_memory, compress, find_routers
from knn_moe.config import LayerRouting
from knn_moe.errors import AttachError, ConfigError
from knn_moe.explain.explanation import ExplainedToken, Explanation, RecalledCase
from knn_moe.report.explanation import LEVELS, render_explanation

K = 3


def router_inputs(model: PreTrainedModel, run: Callable[[], Explanation]) -> dict[int, Tensor]:
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


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "gpt_oss"])
def test_equals_the_same_by_hand(name: str, zoo_tokenizer: Any, prompt: Tensor) -> None:
    model = family(name)
    memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    assert_no_near_ties(model, memory, prompt, RoutingConfig(k=K))
    told: list[Explanation] = []
    with attach(model, memory, RoutingConfig(k=K)) as routing:

        def run() -> Explanation:
            told.append(routing.explain(prompt, tokenizer=zoo_tokenizer))
            return told[0]

        inputs = router_inputs(model, run)
    assert told[0].layers == tuple(memory.layers)
    assert [token.id for token in told[0].tokens] == prompt[0].tolist()
    moved = 0
    for number, router in enumerate(find_routers(model)):
        cases, x = memory.layers[router.layer], inputs[router.layer].double()
        bias = getattr(router.module, "bias", None)
        weight = router.weight.detach().double()
        own = F.linear(x, weight, None if bias is None else bias.detach().double())
        nearest, rows = torch.cdist(x, cases.keys.double()).square().topk(K, largest=False)
        similarity = torch.exp(-cases.gamma * nearest)
        share = similarity / similarity.sum(dim=1, keepdim=True)
        proposal = (share[:, :, None] * cases.values.double()[rows]).sum(dim=1)
        confidence = similarity.mean(dim=1)
        mixed = own + confidence[:, None] * (proposal - own)
        for place, token in enumerate(told[0].tokens):
            case = token.cases[number]
            near = {"rel": 1e-3, "abs": 1e-4}
            assert case.layer == router.layer
            assert case.squared_distance == pytest.approx(float(nearest[place, 0]), **near)
            usual = cases.gamma**-0.5
            assert case.distance * usual == pytest.approx(case.squared_distance**0.5, rel=1e-6)
            assert case.confidence == pytest.approx(float(confidence[place]), **near)
            assert case.weight == pytest.approx(float(share[place, 0]), **near)
            before, after = (set(r[place].topk(2).indices.tolist()) for r in (own, mixed))
            assert set(case.experts_in) == after - before
            assert set(case.experts_out) == before - after
            change = mixed[place] - own[place]
            for expert, delta in [*case.experts_in.items(), *case.experts_out.items()]:
                assert delta == pytest.approx(float(change[expert]), rel=1e-2, abs=1e-3)
            moved += len(case.experts_in)
            assert case.row is not None
            key = memory.provenance.context(case.row, before=10)
            assert TEXTS[case.example].split()[int(memory.provenance.position[case.row])] == str(
                key[0][key[1]]
            )
            assert case.token.strip() == str(key[0][key[1]])
            assert (case.before + case.token + case.after).split() == [str(t) for t in key[0]]
    assert moved > 3


@pytest.fixture(scope="module")
def many(zoo_tokenizer: Any) -> RoutingMemory:
    return build_memory(uneven(), zoo_tokenizer, MANY, BUILD)


def assert_tells_what_was_counted(
    model: PreTrainedModel, memory: RoutingMemory, config: RoutingConfig | None, ids: Tensor
) -> Explanation:
    """λ and changes as an ordinary run counts them."""
    with attach(model, memory, config) as routing:
        with torch.no_grad():
            model(ids, use_cache=False)
        counted = routing.stats()
        told = routing.explain()
        assert routing.stats() == counted  # explaining does not count
    assert told.layers == tuple(counted)
    assert [token.id for token in told.tokens] == ids.flatten().tolist()
    for number, stats in enumerate(counted.values()):
        cases = [token.cases[number] for token in told.tokens]
        mean = sum(case.confidence for case in cases) / len(cases)
        assert mean == pytest.approx(stats.mean_confidence, rel=1e-3, abs=1e-5)
        assert sum(case.changed for case in cases) / len(cases) == pytest.approx(stats.changed)
        assert all(case.row is not None and 0 <= case.row < len(memory) for case in cases)
        assert all(case.squared_distance >= 0 for case in cases)
    return told


@every_kind
@every_similarity
def test_every_index_and_similarity(
    kind: str, similarity: str, many: RoutingMemory, prompt: Tensor
) -> None:
    config = RoutingConfig(k=K, similarity=similarity, index=KINDS[kind][0])
    told = assert_tells_what_was_counted(uneven(), many, config, prompt)
    exact = assert_tells_what_was_counted(uneven(), many, replace(config, index=None), prompt)
    pairs = zip(told.tokens, exact.tokens, strict=True)
    same = [one.cases[0].row == other.cases[0].row for one, other in pairs]
    assert sum(same) >= len(same) * 0.6


@pytest.mark.parametrize("kind", ["fast", "ivfpq"])
def test_compressed_memories(
    kind: str, many: RoutingMemory, prompt: Tensor, tmp_path: Path
) -> None:
    small = compress(many, KINDS[kind][0], tmp_path / "small")
    told = assert_tells_what_was_counted(uneven(), small, None, prompt)
    assert all(case.token for token in told.tokens for case in token.cases)


@pytest.mark.parametrize("similarity", ["rbf", "rbf-unit"])
def test_a_distance_of_one_is_usual(similarity: str, many: RoutingMemory, prompt: Tensor) -> None:
    """λ of one neighbour is exp(-d²) by that measure, whatever γ the routing takes."""
    with attach(uneven_model := uneven(), many, RoutingConfig(similarity=similarity)) as routing:
        told = routing.explain(prompt)
    for case in (case for token in told.tokens for case in token.cases):
        assert case.confidence == pytest.approx(math.exp(-(case.distance**2)), rel=1e-3, abs=1e-5)
    wide = RoutingConfig(similarity=similarity, gamma=1e-6)
    with attach(uneven_model, many, wide) as routing:
        first = routing.explain(prompt).tokens[0].cases[0]
    assert first.distance == pytest.approx(told.tokens[0].cases[0].distance, rel=1e-3)


def test_a_closed_gate(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    config = RoutingConfig(k=K, gate="confidence", gate_share=1.0)
    with attach(zoo_olmoe, zoo_memory, config) as routing:
        told = routing.explain(prompt)
    for token in told.tokens:
        assert (token.confidence, token.changed) == (0, 0)
        assert all(case.row is not None for case in token.cases)


def test_layers_without_trust_are_left_out(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor
) -> None:
    config = RoutingConfig(per_layer=(LayerRouting(layer=0, confidence_factor=0.0),))
    told = assert_tells_what_was_counted(zoo_olmoe, zoo_memory, config, prompt)
    assert told.layers == (1,)
    with pytest.raises(ConfigError, match=r"attached to layer 0. Attached are: \[1\]"):
        told.only([0])
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(confidence_factor=0.0)) as routing:
        silent = routing.explain(prompt)
    assert silent.layers == ()
    assert [token.cases for token in silent.tokens] == [()] * 9
    assert [(token.confidence, token.strongest) for token in silent.tokens] == [(0, None)] * 9
    assert repr(silent) == "Explanation(9 tokens × 0 layers, mean λ 0.00)"
    assert "nothing was recalled" in Page(render_explanation(silent, "m", "m")).text


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
        told = routing.explain(ids, mask, tokenizer=zoo_tokenizer)
        with torch.no_grad():
            zoo_olmoe(ids, attention_mask=mask, use_cache=False)
        again = routing.explain(tokenizer=zoo_tokenizer)
        alone = [routing.explain(text, tokenizer=zoo_tokenizer) for text in texts]
        assert_same(told, again)
        for sequence, text, single in zip(told.sequences, texts, alone, strict=True):
            assert " ".join(str(token.id) for token in sequence) == text
            assert_same(Explanation(told.layers, (sequence,)), single)
        assert "sequence 2 of 3" in str(told)


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


# How it is told.


def made(text: str, layers: int = 2, **facts: Any) -> ExplainedToken:
    usual: dict[str, Any] = {
        **{"before": "the old", "token": " man", "after": " and", "distance": 0.5},
        **{"confidence": 0.25, "experts_in": {7: 0.5}, "experts_out": {3: -1.25}},
        **{"weight": 1.0, "row": 4, "example": 0, "squared_distance": 2.0},
    }
    return ExplainedToken(
        5, text, tuple(RecalledCase(layer=layer, **{**usual, **facts}) for layer in range(layers))
    )


def test_the_table() -> None:
    told = Explanation((0, 1), ((made(" a"), made("b\n", experts_in={}, experts_out={})),))
    lines = str(told).splitlines()
    assert lines[1].split() == ["|", "a|", "0.25", "2/2", "0", "…the", "old[", "man]", "and"]
    assert lines[2].startswith("|b⏎| ")
    assert "0/2" in lines[2]
    detail = told.table(layer=1).splitlines()
    assert "0.25" in detail[1]
    assert "0.50" in detail[1]
    assert detail[1].endswith("in 7 (+0.50) out 3 (-1.25)")
    assert detail[2].endswith("…the old[ man] and")
    assert repr(told).startswith("Explanation(2 tokens × 2 layers, mean λ 0.25)\n")
    long = Explanation((0, 1), ((made("a"),) * 30,))
    assert repr(long).endswith("… 10 more tokens: print it, or use its table()")
    assert len(repr(long).splitlines()) == 23
    assert len(str(long).splitlines()) == 31


def test_lines_keep_their_width_and_carry_no_commands() -> None:
    told = Explanation((0,), ((made("\x1b[31m" * 9, 1, before="\x1b]0;x\x07 way" * 30),),))
    for table in (told.table(), told.table(0), repr(told)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", table)
        assert all(len(line) <= 100 for line in table.splitlines())


def test_nothing_found_is_said_and_is_json() -> None:
    nothing = {"before": "", "token": "", "after": "", "row": None, "example": None}
    far = made("a", 1, **nothing, distance=math.inf, squared_distance=math.inf, confidence=0.0)
    told = Explanation((0,), ((far,),))
    assert "nothing" in str(told)
    case = json.loads(json.dumps(told.to_dict(), allow_nan=False))["sequences"][0][0]["cases"][0]
    assert case["distance"] is case["squared_distance"] is case["row"] is None
    assert "infinite" in render_explanation(told, "m", "m")


def test_the_page_is_whole_and_loads_nothing(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor, zoo_tokenizer: Any
) -> None:
    with attach(zoo_olmoe, zoo_memory) as routing:
        told = routing.explain(torch.cat([prompt, prompt.flip(1)]), tokenizer=zoo_tokenizer)
    html = render_explanation(told, "a model", "a memory")
    parsed = Page(html)
    assert parsed.open == []
    assert not re.search(r"https?://|url\(|@import|<link|<iframe|<img", html)
    assert not any({"src", "href", "srcset"} & attrs.keys() for _, attrs in parsed.tags)
    assert len(parsed.scripts) == 3
    for sequence, script in zip(told.sequences, parsed.scripts, strict=False):
        data = json.loads(script)
        assert [token["text"] for token in data] == [token.text for token in sequence]
        for token, shown in zip(sequence, data, strict=True):
            assert [case["layer"] for case in shown["cases"]] == [0, 1]
            assert shown["change"].startswith(f"Mean λ {token.confidence:.2f}; experts changed in ")
            for case, panel in zip(token.cases, shown["cases"], strict=True):
                assert panel["token"] == case.token
                assert len(panel["in"]) == len(case.experts_in)
                assert all(re.fullmatch(r"\d \([+−]?\d+\.\d\d\)", one) for one in panel["in"])
    coloured = [sum(token.confidence >= level for level in LEVELS) for token in told.tokens]
    texts = parsed.with_class("t")[len(LEVELS) + 1 :]
    assert [attrs["class"] for attrs in texts] == [f"t up-{c}" if c else "t" for c in coloured]


def test_hostile_text_stays_text() -> None:
    bad = "</script><script>alert(1)</script><!-- <b onclick='x'>&amp;\u2028\ud800"
    told = Explanation((0,), ((made(bad, 1, before=bad, token=bad, after=bad),),))
    html = render_explanation(told, bad, bad)
    parsed = Page(html)
    assert parsed.open == []
    assert len(parsed.scripts) == 2
    assert "<!--" not in html
    assert not any(tag == "b" for tag, _ in parsed.tags)
    shown = json.loads(parsed.scripts[0])[0]
    assert [shown["text"], *(shown["cases"][0][p] for p in ("before", "token", "after"))] == [
        bad
    ] * 4


def test_a_space_that_a_tokenizer_drops_is_kept(zoo_tokenizer: Any) -> None:
    """The fixture's tokenizer says "4" of the second token of "3 4", and " 4" is what was read."""
    model = family("olmoe")
    memory = build_memory(model, zoo_tokenizer, ["3 4 5 6"], BUILD)
    with attach(model, memory) as routing:
        told = routing.explain(encode(zoo_tokenizer, "3 4 5"), tokenizer=zoo_tokenizer)
        numbers = routing.explain(encode(zoo_tokenizer, "3 4 5"))
    assert [token.text for token in told.tokens] == ["3", " 4", " 5"]
    assert [token.text for token in numbers.tokens] == [" 3", " 4", " 5"]
    case = told.tokens[1].cases[0]
    assert (case.before, case.token, case.after) == ("3", " 4", " 5")
