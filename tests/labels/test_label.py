"""Answers of the model itself: how they are scored, and which are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from helpers.labelling import PROMPTS, SHORT
from helpers.zoo import family
from knn_moe import BuildConfig, Example, LabelConfig, build_memory, label
from knn_moe.bench.models import number_tokenizer
from knn_moe.errors import ConfigError, LabelError, ReferenceSetError
from knn_moe.labels.label import Labelled, select_kept, summarise
from knn_moe.reference.examples import tokenise
from knn_moe.support.progress import Progress

JUDGED = replace(SHORT, by="judge", keep=None)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def completions(labelled: Sequence[Labelled]) -> list[str]:
    return [each.example.completion for each in labelled]


@torch.no_grad()
def generate_plainly(model: PreTrainedModel, ids: list[int], count: int) -> tuple[list[int], float]:
    """Return the greedy tokens after one prompt, and their mean log-probability."""
    generated: list[int] = []
    total = 0.0
    for _ in range(count):
        logits = model(torch.tensor([ids + generated]), use_cache=False).logits[0, -1]
        likeliest = logits.log_softmax(-1).max(dim=-1)
        generated.append(int(likeliest.indices))
        total += float(likeliest.values)
    return generated, total / count


@pytest.fixture(scope="module")
def reports() -> list[Progress]:
    return []


@pytest.fixture(scope="module")
def labelled(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, reports: list[Progress]
) -> list[Labelled]:
    return label(tiny_olmoe, tiny_tokenizer, PROMPTS, SHORT, on_progress=reports.append)


@pytest.mark.slow
def test_the_greedy_answer_is_scored_by_its_log_probability(
    tiny_olmoe: PreTrainedModel,
    tiny_tokenizer: Any,
    labelled: list[Labelled],
    reports: list[Progress],
) -> None:
    same_tokens = 0
    for prompt, each in zip(PROMPTS, labelled, strict=True):
        ids = tiny_tokenizer(prompt)["input_ids"]
        generated, score = generate_plainly(tiny_olmoe, ids, 8)
        assert each.example == Example(prompt, tiny_tokenizer.decode(generated))
        if tokenise(each.example, tiny_tokenizer).ids == ids + generated:
            same_tokens += 1
            assert each.score == pytest.approx(score, abs=1e-4)
    assert same_tokens >= 4  # some texts are tokenised differently when read back
    assert reports[-1] == Progress("scoring", 6, 6)
    assert Progress("answering", 6, 6) in reports


def test_the_best_half_is_kept_and_a_memory_can_be_built_of_it(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, labelled: list[Labelled]
) -> None:
    median = sorted(each.score for each in labelled)[3]
    assert [each.kept for each in labelled] == [each.score >= median for each in labelled]
    kept = [each.example for each in labelled if each.kept]
    memory = build_memory(tiny_olmoe, tiny_tokenizer, kept, BuildConfig(tokens="completion"))
    assert memory.provenance.num_examples == 3
    assert 3 * 7 <= len(memory) <= 3 * 9


def test_padding_and_batches_change_nothing(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, labelled: list[Labelled]
) -> None:
    alone = label(tiny_olmoe, tiny_tokenizer, PROMPTS[:3], replace(SHORT, batch_size=1))
    assert completions(alone) == completions(labelled[:3])
    for one, two in zip(alone, labelled[:3], strict=True):
        assert one.score == pytest.approx(two.score, abs=1e-4)


@pytest.mark.slow
def test_the_answer_of_most_samples_is_scored_by_their_share(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    config = LabelConfig(
        by="agreement", samples=6, temperature=0.5, max_new_tokens=2, threshold=0.5, batch_size=12
    )

    def label_with(**changes: Any) -> list[Labelled]:
        return label(tiny_olmoe, tiny_tokenizer, PROMPTS, replace(config, **changes))

    state = torch.get_rng_state()
    labelled = label_with()
    assert torch.equal(torch.get_rng_state(), state)
    assert labelled == label_with()
    assert labelled != label_with(seed=1)
    assert {each.score * 6 for each in labelled} <= {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
    assert [each.kept for each in labelled] == [each.score >= 0.5 for each in labelled]
    cold = label_with(temperature=1e-3)
    assert all(each.score == 1 for each in cold)
    greedy = label(tiny_olmoe, tiny_tokenizer, PROMPTS, replace(SHORT, max_new_tokens=2))
    assert completions(cold) == completions(greedy)
    assert all(each.score == 1 for each in label_with(same=lambda one, two: True))


def test_a_function_can_be_the_judge(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, labelled: list[Labelled]
) -> None:
    pairs: list[tuple[str, str]] = []

    def judge(prompt: str, answer: str) -> bool:
        pairs.append((prompt, answer))
        return "door" in prompt

    judged = label(tiny_olmoe, tiny_tokenizer, PROMPTS, JUDGED, judge=judge)
    assert [each.kept for each in judged] == [True, *[False] * 5]
    answers = [text.strip() for text in completions(labelled)]
    assert pairs == list(zip(PROMPTS, answers, strict=True))


@pytest.mark.parametrize(
    ("verdict", "error"),
    [("yes", "a number or a bool, got 'yes'"), (math.nan, "no verdict on any of 1 answers")],
)
def test_a_verdict_must_be_a_number(
    verdict: Any, error: str, tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    with pytest.raises(LabelError, match=error):
        label(tiny_olmoe, tiny_tokenizer, PROMPTS[:1], JUDGED, judge=lambda *pair: verdict)


def test_an_answer_ends_before_the_stop_text(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, labelled: list[Labelled]
) -> None:
    text = completions(labelled)[0]
    stop = text[len(text) // 2]
    cut = label(tiny_olmoe, tiny_tokenizer, PROMPTS[:1], replace(SHORT, stop=stop))
    assert completions(cut) == [text.partition(stop)[0]]
    empty = label(tiny_olmoe, tiny_tokenizer, PROMPTS[:1], replace(SHORT, stop=text[0]))
    assert math.isnan(empty[0].score)
    assert not empty[0].kept


def test_conversations_use_the_chat_template(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [{"role": "user", "content": "Who opened the door?"}]
    with pytest.raises(ReferenceSetError, match="no chat template"):
        label(tiny_olmoe, tiny_tokenizer, [asked], SHORT)
    monkeypatch.setattr(tiny_tokenizer, "chat_template", TEMPLATE)
    (labelled,) = label(tiny_olmoe, tiny_tokenizer, [asked], replace(SHORT, keep=1.0))
    ids = tiny_tokenizer("user: Who opened the door?\nassistant: ")["input_ids"]
    answer = tiny_tokenizer.decode(generate_plainly(tiny_olmoe, ids, 8)[0]).strip()
    assert labelled.example.messages == (*asked, {"role": "assistant", "content": answer})
    assert labelled.kept


def test_an_answer_that_is_only_an_end_token_is_empty() -> None:
    model, tokenizer = family("olmoe"), number_tokenizer(128)
    ids = torch.tensor([tokenizer("5 6 7")["input_ids"]])
    end = int(model(ids).logits[0, -1].argmax())
    model.generation_config.eos_token_id = end
    tokenizer.add_special_tokens({"eos_token": tokenizer.convert_ids_to_tokens(end)})
    (labelled,) = label(model, tokenizer, ["5 6 7"], replace(SHORT, keep=1.0))
    assert math.isnan(labelled.score)
    assert not labelled.kept


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"by": "agrement"}, r"Unknown way to label 'agrement'. Did you mean 'agreement'\?"),
        ({"keep": 0.5, "threshold": 1.0}, "Choose one of keep"),
        ({"keep": 0}, "keep must be"),
        ({"by": "agreement", "samples": 1}, "samples must be at least 2"),
        ({"temperature": 0}, "temperature must be positive"),
        ({"stop": ""}, "stop must not be empty"),
        ({"threshold": math.nan}, "threshold must be a number"),
    ],
)
def test_a_config_out_of_range_is_refused(wrong: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        LabelConfig(**wrong)


def test_prompts_that_cannot_be_answered_are_refused(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    with pytest.raises(LabelError, match="no prompts"):
        label(tiny_olmoe, tiny_tokenizer, [])
    with pytest.raises(LabelError, match="more than the 1024 tokens the model can read"):
        label(tiny_olmoe, tiny_tokenizer, PROMPTS, replace(SHORT, max_new_tokens=1020))
    with pytest.raises(ConfigError, match="go together"):
        label(tiny_olmoe, tiny_tokenizer, PROMPTS, SHORT, judge=lambda *pair: True)


@given(st.lists(st.floats(-9, 9) | st.just(math.nan), min_size=1), st.floats(0.01, 1))
def test_the_share_with_the_highest_scores_is_kept(scores: list[float], keep: float) -> None:
    kept = select_kept(scores, LabelConfig(keep=keep))
    known = [score for score in scores if not math.isnan(score)]
    assert sum(kept) == min(len(known), math.ceil(keep * len(scores)))
    inside = [score for score, each in zip(scores, kept, strict=True) if each]
    outside = [s for s, each in zip(scores, kept, strict=True) if not each and not math.isnan(s)]
    assert not inside or not outside or min(inside) >= max(outside)


def test_a_threshold_keeps_the_scores_from_there_on() -> None:
    config = LabelConfig(threshold=0.5)
    assert select_kept([0.4, 0.5, math.nan, 1.0], config) == [False, True, False, True]


def test_the_summary_of_answers_without_scores() -> None:
    facts = summarise([Labelled(Example("a", ""), math.nan, False)])
    assert facts == {"prompts": 1, "kept": 0, "unscored": 1, "scores": {}}
