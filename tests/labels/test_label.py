"""Labels of a model's own: how answers are scored, which are kept, and what a build reads."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from helpers.commands import knn_moe
from helpers.tiny import model, tokenizer  # noqa: F401
from helpers.zoo import family
from knn_moe import BuildConfig, Example, LabelConfig, build_memory, label, load_examples
from knn_moe.bench.models import number_tokenizer
from knn_moe.errors import ConfigError, LabelError, ReferenceSetError
from knn_moe.labels.agreement import majority
from knn_moe.labels.label import Labelled, chosen, summary
from knn_moe.labels.prompts import load_prompts
from knn_moe.reference.examples import tokenise
from knn_moe.support.progress import Progress

PROMPTS = [
    "She opened the door and",
    "The patient had a fever and a cough, and the doctor",
    "import os\nimport sys\n\n\ndef main():\n    for name in sys.argv[1:]:\n        print(",
    "The court held that",
    "Once upon a time there was a little",
    "The square of a number is",
]
SHORT = LabelConfig(max_new_tokens=8, batch_size=4)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def completions(found: Sequence[Labelled]) -> list[str]:
    return [one.example.completion for one in found]


def greedy(model: PreTrainedModel, ids: list[int], count: int) -> tuple[list[int], float]:
    """One prompt alone, a token at a time: what it says, and the mean log-probability of that."""
    said, total = [], 0.0
    with torch.no_grad():
        for _ in range(count):
            row = model(torch.tensor([ids + said]), use_cache=False).logits[0, -1].log_softmax(-1)
            said.append(int(row.argmax()))
            total += float(row.max())
    return said, total / count


def test_the_likeliest_answer_and_how_sure_the_model_is(
    model: PreTrainedModel, tokenizer: Any
) -> None:
    progress: list[Progress] = []
    found = label(model, tokenizer, PROMPTS, SHORT, on_progress=progress.append)
    same_tokens = 0
    for prompt, one in zip(PROMPTS, found, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        said, score = greedy(model, ids, 8)
        assert one.example == Example(prompt, tokenizer.decode(said))
        tokens = tokenise(one.example, tokenizer)
        if tokens.ids == ids + said:  # else the text is read back in other tokens
            same_tokens += 1
            assert one.score == pytest.approx(score, abs=1e-4)
    assert same_tokens >= 4
    assert progress[-1] == Progress("scoring", 6, 6)
    assert Progress("answering", 6, 6) in progress


def test_the_surest_are_kept(model: PreTrainedModel, tokenizer: Any) -> None:
    half = label(model, tokenizer, PROMPTS, SHORT)
    scores = sorted(one.score for one in half)
    assert [one.kept for one in half] == [one.score >= scores[3] for one in half]
    assert all(one.kept for one in label(model, tokenizer, PROMPTS, replace(SHORT, keep=1.0)))
    least = replace(SHORT, keep=None, threshold=scores[4])
    assert sum(one.kept for one in label(model, tokenizer, PROMPTS, least)) == 2


def test_padding_and_batches_change_nothing(model: PreTrainedModel, tokenizer: Any) -> None:
    one_by_one = label(model, tokenizer, PROMPTS, replace(SHORT, batch_size=1))
    together = label(model, tokenizer, PROMPTS, replace(SHORT, batch_size=6))
    assert completions(one_by_one) == completions(together)
    for one, two in zip(one_by_one, together, strict=True):
        assert one.score == pytest.approx(two.score, abs=1e-4)


def test_what_most_samples_say(model: PreTrainedModel, tokenizer: Any) -> None:
    config = LabelConfig(
        by="agreement", samples=6, temperature=0.5, max_new_tokens=2, threshold=0.5, batch_size=12
    )
    state = torch.get_rng_state()
    found = label(model, tokenizer, PROMPTS, config)
    assert torch.equal(torch.get_rng_state(), state)
    assert found == label(model, tokenizer, PROMPTS, config)
    assert found != label(model, tokenizer, PROMPTS, replace(config, seed=1))
    assert {one.score * 6 for one in found} <= {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
    assert [one.kept for one in found] == [one.score >= 0.5 for one in found]
    cold = label(model, tokenizer, PROMPTS, replace(config, temperature=1e-3))
    assert all(one.score == 1 for one in cold)
    assert completions(cold) == completions(
        label(model, tokenizer, PROMPTS, replace(SHORT, max_new_tokens=2))
    )
    anything = label(model, tokenizer, PROMPTS, replace(config, same=lambda one, two: True))
    assert all(one.score == 1 for one in anything)


def test_majorities() -> None:
    assert majority(["B.", " b", "A", "B."]) == ("B.", 0.75)
    assert majority(["A", "B"]) == ("A", 0.5)
    assert majority(["12", "12.0", "3"], lambda one, two: float(one) == float(two)) == ("12", 2 / 3)
    assert majority(["The  cat\nsat!", "the cat sat"]).share == 1


@given(st.lists(st.sampled_from("ab c"), min_size=1))
def test_a_majority_is_among_the_answers_and_counts_itself(answers: list[str]) -> None:
    answer, share = majority(answers)
    assert answer in answers
    assert round(share * len(answers)) >= answers.count(answer)


def test_a_function_may_judge(model: PreTrainedModel, tokenizer: Any) -> None:
    seen: list[tuple[str, str]] = []

    def judge(prompt: str, answer: str) -> bool:
        seen.append((prompt, answer))
        return "door" in prompt

    found = label(model, tokenizer, PROMPTS, replace(SHORT, by="judge", keep=None), judge=judge)
    assert [one.kept for one in found] == [True, *[False] * 5]
    assert [prompt for prompt, _ in seen] == PROMPTS
    assert [answer for _, answer in seen] == [text.strip() for text in completions(found)]


@pytest.mark.parametrize("verdict", [None, "yes"])
def test_a_verdict_is_a_number(model: PreTrainedModel, tokenizer: Any, verdict: Any) -> None:
    config = replace(SHORT, by="judge", keep=None)
    with pytest.raises(LabelError, match="a number or a bool, got"):
        label(model, tokenizer, PROMPTS[:1], config, judge=lambda prompt, answer: verdict)
    with pytest.raises(LabelError, match="no verdict on any"):
        label(model, tokenizer, PROMPTS[:1], config, judge=lambda prompt, answer: math.nan)


def test_answers_end_before_a_stop(model: PreTrainedModel, tokenizer: Any) -> None:
    plain = label(model, tokenizer, PROMPTS[:1], replace(SHORT, max_new_tokens=16))
    text = completions(plain)[0]
    stop = text[len(text) // 2]
    cut = label(model, tokenizer, PROMPTS[:1], replace(SHORT, max_new_tokens=16, stop=stop))
    assert completions(cut) == [text.partition(stop)[0]]
    nothing = label(model, tokenizer, PROMPTS[:1], replace(SHORT, stop=text[0]))
    assert math.isnan(nothing[0].score)
    assert not nothing[0].kept


def test_conversations_go_through_the_template(model: PreTrainedModel, tokenizer: Any) -> None:
    asked = [{"role": "user", "content": "Who opened the door?"}]
    with pytest.raises(ReferenceSetError, match="no chat template"):
        label(model, tokenizer, [asked], SHORT)
    tokenizer.chat_template = TEMPLATE
    try:
        (found,) = label(model, tokenizer, [asked], replace(SHORT, keep=1.0))
        said, _ = greedy(
            model, tokenizer("user: Who opened the door?\nassistant: ")["input_ids"], 8
        )
        answer = tokenizer.decode(said).strip()
        assert found.example.messages == (*asked, {"role": "assistant", "content": answer})
        assert found.kept
    finally:
        tokenizer.chat_template = None


def test_a_memory_can_be_built_of_labels(model: PreTrainedModel, tokenizer: Any) -> None:
    found = label(model, tokenizer, PROMPTS, SHORT)
    kept = [one.example for one in found if one.kept]
    memory = build_memory(model, tokenizer, kept, BuildConfig(tokens="completion"))
    assert memory.provenance.num_examples == 3
    assert 3 * 7 <= len(memory) <= 3 * 9


def test_what_cannot_be_labelled_is_told(model: PreTrainedModel, tokenizer: Any) -> None:
    for settings, says in (
        ({"by": "vote"}, "Unknown way to label 'vote'"),
        ({"keep": 0.5, "threshold": 1.0}, "Choose one of keep"),
        ({"keep": 0}, "keep must be"),
        ({"by": "agreement", "samples": 1}, "samples must be at least 2"),
        ({"temperature": 0}, "temperature must be positive"),
        ({"stop": ""}, "stop must be a text"),
        ({"threshold": math.nan}, "threshold must be a number"),
    ):
        with pytest.raises(ConfigError, match=says):
            LabelConfig(**settings)
    for prompts, says in (
        ([{"prompt": "A", "completion": "B"}], "Prompt 0 has a completion already"),
        ([{"text": "A"}], "its own label"),
        ([{"question": "A"}], 'needs "prompt" or "messages"; has \'question\''),
        (["A", ""], "Prompt 1 is empty"),
        ([[{"role": "assistant", "content": "A"}]], "ends with an answer already"),
        ([3], "must be a text or chat messages; got int"),
    ):
        with pytest.raises(ReferenceSetError, match=says):
            load_prompts(prompts)  # type: ignore[arg-type]
    with pytest.raises(LabelError, match="no prompts"):
        label(model, tokenizer, [])
    with pytest.raises(LabelError, match="the model reads 1024"):
        label(model, tokenizer, PROMPTS, replace(SHORT, max_new_tokens=1020))
    with pytest.raises(ConfigError, match="go together"):
        label(model, tokenizer, PROMPTS, SHORT, judge=lambda prompt, answer: True)


@given(st.lists(st.floats(-9, 9) | st.just(math.nan), min_size=1), st.floats(0.01, 1))
def test_a_share_is_kept_and_none_better_is_left(scores: list[float], keep: float) -> None:
    kept = chosen(scores, LabelConfig(keep=keep))
    known = [score for score in scores if not math.isnan(score)]
    assert sum(kept) == min(len(known), math.ceil(keep * len(scores)))
    inside = [score for score, one in zip(scores, kept, strict=True) if one]
    outside = [s for s, one in zip(scores, kept, strict=True) if not one and not math.isnan(s)]
    assert not inside or not outside or min(inside) >= max(outside)


def test_the_summary_of_nothing_scored() -> None:
    facts = summary([Labelled(Example("a", ""), math.nan, False)])
    assert facts == {"prompts": 1, "kept": 0, "unscored": 1, "scores": {}}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


QUICK = ("--max-new-tokens", 8, "--device", "cpu")


def test_by_command(prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "reference.jsonl"
    result = knn_moe("label", "tiny-olmoe", prompts, "-o", output, *QUICK)
    assert result.exit_code == 0, result.output
    assert "Kept 3 of 6 prompts" in result.stdout
    assert "Scores by confidence: -" in result.stdout
    examples = load_examples(output)
    assert len(examples) == 3
    assert {example.prompt for example in examples} < set(PROMPTS)
    assert all(example.completion for example in examples)
    built = knn_moe("build", "tiny-olmoe", output, "-o", tmp_path / "memory", "--device", "cpu")
    assert built.exit_code == 0, built.output
    again = knn_moe("label", "tiny-olmoe", prompts, "-o", output, *QUICK)
    assert again.exit_code == 2
    assert "already exists" in again.stderr
    options = ("--by", "agreement", "--samples", 4, "--threshold", 0.25, "--overwrite", "--json")
    facts = json.loads(
        knn_moe("label", "tiny-olmoe", prompts, "-o", output, *QUICK, *options).stdout
    )
    assert (facts["prompts"], facts["kept"], facts["by"]) == (6, 6, "agreement")
    assert facts["scores"]["least"] >= 0.25
    assert len(load_examples(output)) == 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--by", "judge"), "--judge URL go together"),
        (("--judge", "http://h"), "Give both"),
        (("--keep", "2"), "keep must be"),
        (("--threshold", "0"), "No answer was worth keeping"),
        (("--chat",), "no chat template"),
    ],
)
def test_refusals_leave_nothing(
    options: tuple[str, ...], says: str, prompts: Path, tmp_path: Path
) -> None:
    result = knn_moe("label", "tiny-olmoe", prompts, "-o", tmp_path / "r.jsonl", *QUICK, *options)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_bad_files_are_told_before_the_model_loads(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for text, says in (("", "is empty"), ("{", "line 1: not JSON"), ('{"a": 1}', "line 1: needs")):
        path.write_text(text)
        with pytest.raises(ReferenceSetError, match=says):
            load_prompts(path)
        assert knn_moe("label", "no/model", path, "-o", tmp_path / "r.jsonl").exit_code == 2
    with pytest.raises(ReferenceSetError, match="No file of prompts"):
        load_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ReferenceSetError, match="Cannot tell what"):
        load_prompts(_written(tmp_path / "prompts.csv", "a"))
    assert [one.text for one in load_prompts(_written(tmp_path / "p.txt", "a b\n\nc\n"))] == [
        "a b",
        "c",
    ]
    for output in ("r.txt", "nowhere/r.jsonl"):
        path.write_text('"a"\n')
        assert knn_moe("label", "no/model", path, "-o", tmp_path / output).exit_code == 2


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_an_end_token_ends_an_answer() -> None:
    """A model that says its end token at once has said nothing."""
    network, numbers = family("olmoe"), number_tokenizer(128)
    network.generation_config.eos_token_id = int(
        network(torch.tensor([numbers("5 6 7")["input_ids"]])).logits[0, -1].argmax()
    )
    numbers.add_special_tokens(
        {"eos_token": numbers.convert_ids_to_tokens(network.generation_config.eos_token_id)}
    )
    (found,) = label(network, numbers, ["5 6 7"], replace(SHORT, keep=1.0))
    assert math.isnan(found.score)
    assert not found.kept
