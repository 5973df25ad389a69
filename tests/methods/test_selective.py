"""Selective recall: each sample equals that of a plain run, without memory in the easy third."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.quiz import WORDS
from helpers.tiny import trained
from helpers.unchanged import left_as_it_was
from knn_moe import BuildConfig, build_memory, find_routers
from knn_moe.errors import MemoryMismatchError
from knn_moe.evaluation.compare import match_samples
from knn_moe.evaluation.evaluate import EvalConfig, evaluate
from knn_moe.evaluation.store import Run
from knn_moe.methods import KnnMoe, TaskContext, prepare
from knn_moe.methods.selective import SelectiveKnnMoe, lowest_third
from knn_moe.routers.intercept import find_hook
from knn_moe.support.statistics import by_tercile
from knn_moe.tasks import Choice, Number, Task, TaskData, Text
from knn_moe.tasks.sample import Sample


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows that suit every kind of task."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        chosen = torch.randint(len(WORDS), (4 + number % 5,), generator=draw).tolist()
        words = " ".join(WORDS[place] for place in chosen)
        made.append({"question": f"What of {words}, {seed}-{number}?", "text": f"{words}. " * 6,
                     "choices": ["the sky", "a long road", "bread"], "answer": 1})  # fmt: skip
    return made


KINDS = {"likelihood": Choice(), "generation": Number(max_new_tokens=4), "text": Text()}


@pytest.fixture(scope="module")
def contexts(tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any) -> dict[str, TaskContext]:
    """A context for each scoring; its memory is built when it is first needed."""
    made = {}
    for scoring, kind in KINDS.items():
        test, reference = rows(10, seed=0), rows(4, seed=1)
        for row in (*test, *reference):
            row["answer"] = "1" if scoring == "generation" else 1
        task = Task(name="quiz", title="Quiz", kind=kind, files="quiz")
        data = TaskData(task, test, reference, "made up")
        made[scoring] = TaskContext(tiny_olmoe, tiny_tokenizer, data, scoring, length=32)
    return made


def run(context: TaskContext, method: Any, folder: Path, **options: Any) -> Run:
    config = EvalConfig(scoring=context.scoring, batch_size=4, length=32)
    return evaluate(
        context.model, context.tokenizer, context.data, method, config, folder=folder, **options
    )


def by_id(run: Run) -> dict[str, Sample]:
    return {sample.id: sample for sample in run.samples}


@pytest.mark.slow
@pytest.mark.parametrize("scoring", KINDS)
def test_samples_are_those_of_the_plain_runs(
    scoring: str, contexts: dict[str, TaskContext], tmp_path: Path
) -> None:
    context = contexts[scoring]
    model: Any = context.model
    with left_as_it_was(model):
        runs = {
            name: run(context, prepare(name, context), tmp_path / name)
            for name in ("zero-shot", "knn", "knn-selective")
        }
    alone, recalled, mixed = map(by_id, runs.values())
    low = sorted(alone, key=lambda name: (alone[name].nll, name))[: -(-len(alone) // 3)]
    assert 0 < len(low) < len(alone)
    for name, sample in mixed.items():
        assert alone[name] != recalled[name]
        assert sample == (alone if name in low else recalled)[name]
    assert [sample.id for sample in runs["knn"].samples] == list(mixed)
    assert "zero-shot perplexity" in runs["knn-selective"].facts["method_facts"]["selected"]
    # The third without memory is the one in which a comparison by thirds sees no change.
    pairs = match_samples(runs["knn-selective"], runs["zero-shot"])
    losses = [[float(pair[side].nll or 0) for pair in pairs] for side in (0, 1)]
    thirds = by_tercile(losses[1], losses[0], losses[1], resamples=10)
    assert thirds.low.difference == 0
    assert thirds.mid.difference != 0


def test_a_third_is_rounded_up_and_ties_go_by_id() -> None:
    losses = {"b": 1.0, "c": 1.0, "a": 2.0, "d": 1.0, "e": None, "f": None, "g": 3.0}
    samples = [
        Sample(id=name, prompt="", score=0.0, nll=nll, batch=0) for name, nll in losses.items()
    ]
    assert lowest_third(samples) == {"b", "c", "d"}
    assert lowest_third(samples[:5]) == {"b", "c"}
    assert lowest_third([]) == set()


class KilledError(Exception):
    pass


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_result(
    contexts: dict[str, TaskContext], tmp_path: Path
) -> None:
    context = contexts["likelihood"]
    method = prepare("knn-selective", context).method
    whole = run(context, method, tmp_path / "whole")

    def kill(progress: object) -> None:
        raise KilledError

    with pytest.raises(KilledError):
        run(context, method, tmp_path / "killed", on_progress=kill)
    assert not any(find_hook(router) for router in find_routers(context.model))
    again = run(context, method, tmp_path / "killed", resume=True)
    assert by_id(again) == by_id(whole)


def test_a_memory_of_another_model_is_refused_before_anything_is_written(
    contexts: dict[str, TaskContext], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    other = trained("tiny-qwen3")
    memory = build_memory(other, tiny_tokenizer, ["The rain fell."], BuildConfig(steps=0))
    with pytest.raises(MemoryMismatchError, match="This memory was built for"):
        run(contexts["likelihood"], SelectiveKnnMoe(KnnMoe(memory)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
