"""Selective recall: each sample equals that of a plain run, without memory in the easy third."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from knn_moe import BuildConfig, build_memory, find_routers
from knn_moe.errors import MemoryMismatchError
from knn_moe.evaluation.compare import match_samples
from knn_moe.evaluation.evaluate import EvalConfig, evaluate
from knn_moe.evaluation.store import Run
from knn_moe.methods import KnnMoe, Method, TaskContext, ZeroShot, prepare
from knn_moe.methods.selective import SelectiveKnnMoe, lowest_third
from knn_moe.routers.intercept import find_hook
from knn_moe.support.embedded_models import embedded_model
from knn_moe.support.statistics import by_tercile
from knn_moe.tasks import Choice, Number, Task, TaskData, Text
from knn_moe.tasks.sample import Sample

WORDS = "a stone the river some bread green light one mountain two birds rain".split()  # noqa: SIM905


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows that suit every kind of task."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        chosen = torch.randint(len(WORDS), (4 + number % 5,), generator=draw).tolist()
        words = " ".join(WORDS[place] for place in chosen)
        made.append({"question": f"What of {words}, {seed}-{number}?", "text": f"{words}. " * 12,
                     "choices": ["the sky", "a long road", "bread"], "answer": 1})  # fmt: skip
    return made


KINDS = {"likelihood": Choice(), "generation": Number(max_new_tokens=4), "text": Text()}


def data_of(scoring: str) -> TaskData:
    test, reference = rows(10, seed=0), rows(4, seed=1)
    if scoring == "generation":
        test, reference = ([{**row, "answer": "1"} for row in part] for part in (test, reference))
    task = Task(name="quiz", title="Quiz", kind=KINDS[scoring], files="quiz")
    return TaskData(task, test, reference, "made up")


def config_of(scoring: str) -> EvalConfig:
    return EvalConfig(scoring=scoring, batch_size=4, length=32)


def by_id(run: Run) -> dict[str, Sample]:
    return {sample.id: sample for sample in run.samples}


@pytest.mark.parametrize("scoring", KINDS)
def test_samples_are_those_of_the_plain_runs(
    scoring: str, tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    data, config = data_of(scoring), config_of(scoring)
    context = TaskContext(tiny_olmoe, tiny_tokenizer, data, scoring, length=32)
    state = {name: tensor.clone() for name, tensor in tiny_olmoe.state_dict().items()}
    runs = {
        name: evaluate(
            tiny_olmoe, tiny_tokenizer, data, prepare(name, context), config, folder=tmp_path / name
        )
        for name in ("zero-shot", "knn", "knn-selective")
    }
    alone, recalled, mixed = map(by_id, runs.values())
    low = sorted(alone, key=lambda name: (alone[name].nll, name))[: -(-len(alone) // 3)]
    assert 0 < len(low) < len(alone)
    for name, sample in mixed.items():
        assert alone[name] != recalled[name]
        assert sample == (alone if name in low else recalled)[name]
    assert [sample.id for sample in runs["knn"].samples] == list(mixed)
    assert "lowest zero-shot perplexity" in runs["knn-selective"].facts["method_facts"]["selected"]
    assert all(torch.equal(state[name], tensor) for name, tensor in tiny_olmoe.state_dict().items())
    assert not any(find_hook(router) for router in find_routers(tiny_olmoe))
    # The third without memory is the one in which a comparison by thirds sees no change.
    pairs = match_samples(runs["knn-selective"], runs["zero-shot"])
    losses = [[float(pair[side].nll or 0) for pair in pairs] for side in (0, 1)]
    thirds = by_tercile(losses[1], losses[0], losses[1], resamples=10)
    assert thirds.low.difference == 0
    assert thirds.mid.difference != 0


def sample(name: str, nll: float | None) -> Sample:
    return Sample(id=name, prompt="", score=0.0, nll=nll, batch=0)


def test_a_third_is_rounded_up_and_ties_go_by_id() -> None:
    losses = {"b": 1.0, "c": 1.0, "a": 2.0, "d": 1.0, "e": None, "f": None, "g": 3.0}
    samples = [sample(name, nll) for name, nll in losses.items()]
    assert lowest_third(samples) == {"b", "c", "d"}
    assert lowest_third(samples[:5]) == {"b", "c"}
    assert lowest_third([]) == set()


class KilledError(Exception):
    pass


def test_a_killed_run_resumes_to_the_same_result(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    data, config = data_of("likelihood"), config_of("likelihood")
    method = prepare(
        "knn-selective", TaskContext(tiny_olmoe, tiny_tokenizer, data, "likelihood")
    ).method
    whole = evaluate(tiny_olmoe, tiny_tokenizer, data, method, config, folder=tmp_path / "whole")

    def kill(progress: object) -> None:
        raise KilledError

    with pytest.raises(KilledError):
        evaluate(
            tiny_olmoe,
            tiny_tokenizer,
            data,
            method,
            config,
            folder=tmp_path / "x",
            on_progress=kill,
        )
    assert not any(find_hook(router) for router in find_routers(tiny_olmoe))
    again = evaluate(
        tiny_olmoe, tiny_tokenizer, data, method, config, folder=tmp_path / "x", resume=True
    )
    assert by_id(again) == by_id(whole)


def test_a_memory_of_another_model_is_refused_before_anything_is_written(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    other = AutoModelForCausalLM.from_pretrained(
        embedded_model("tiny-qwen3"), dtype=torch.float32
    ).eval()
    memory = build_memory(other, tiny_tokenizer, ["The rain fell."], BuildConfig(steps=0))
    method: Method = SelectiveKnnMoe(KnnMoe(memory))
    with pytest.raises(MemoryMismatchError, match="This memory was built for"):
        evaluate(
            tiny_olmoe,
            tiny_tokenizer,
            data_of("likelihood"),
            method,
            config_of("likelihood"),
            folder=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_gated_is_recall_with_a_gate(
    tiny_olmoe: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    data, config = data_of("likelihood"), config_of("likelihood")
    context = TaskContext(tiny_olmoe, tiny_tokenizer, data, "likelihood")
    method = prepare("knn-gated", context).method
    assert isinstance(method, KnnMoe)
    assert method.facts()["routing"]["gate"] == "entropy"
    others: list[Method] = [ZeroShot(), prepare("knn", context).method, method]
    runs = [
        evaluate(tiny_olmoe, tiny_tokenizer, data, each, config, folder=tmp_path / each.name)
        for each in others
    ]
    assert runs[2].method == "knn-gated"
    alone, recalled, gated = map(by_id, runs)
    assert all(gated[name] not in (alone[name], recalled[name]) for name in gated)
