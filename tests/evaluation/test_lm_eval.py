"""lm-evaluation-harness gives the numbers of plain arithmetic, with a memory and without."""

from __future__ import annotations

import gc
import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from helpers.large_steps import build_with_large_steps
from knn_moe import (
    HeadConfig,
    IndexConfig,
    RoutingMemory,
    attach,
    find_routers,
)
from knn_moe.errors import (
    AttachError,
    ConfigError,
    MemoryFormatError,
    MemoryMismatchError,
    MissingDependencyError,
)
from knn_moe.evaluation.evaluate import EvalConfig, evaluate
from knn_moe.evaluation.lm_eval import KnnMoeLM, main
from knn_moe.methods import KnnMoe, Method, ZeroShot
from knn_moe.routers.intercept import find_hook
from knn_moe.tasks import Choice, Task, TaskData

pytestmark = pytest.mark.usefixtures("harness_offline")

REMEMBERED = [
    ("Which planet is nearest to the sun?", ["Venus", "Mercury", "the Earth", "Mars"], 1),
    ("What is frozen water called?", ["ice", "steam", "dew", "a cloud of very small drops"], 0),
    ("What do bees make?", ["silk", "milk", "honey", "paper money"], 2),
]
NEW = [
    ("Which metal is liquid at room temperature?", ["iron", "gold", "mercury", "tin"], 2),
    ("Which season follows the winter?", ["spring", "summer", "autumn", "another winter"], 0),
    ("What does a thermometer measure?", ["time", "mass", "distance", "temperature"], 3),
]
QUIZ = [*REMEMBERED, *NEW]
READ = [f"Question: {question}\nAnswer: {choices[gold]}" for question, choices, gold in REMEMBERED]
TASK = """
task: quiz
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/quiz.jsonl}}
  cache_dir: {folder}/cache
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: " "
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@dataclass(frozen=True)
class Scores:
    """Shapes: likelihoods [questions, choices], the summed log-probabilities."""

    likelihoods: torch.Tensor
    acc: float
    acc_norm: float


@pytest.fixture(scope="module")
def harness_offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, and no description of the machine, which takes lm_eval seconds to collect."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
        patch.setattr("datasets.config.HF_MODULES_CACHE", str(home / "modules"))
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield


@pytest.fixture(scope="module")
def quiz_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task for the harness, and its data."""
    folder = tmp_path_factory.mktemp("quiz")
    rows = [dict(zip(("question", "choices", "gold"), row, strict=True)) for row in QUIZ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "quiz.jsonl").write_text(text, encoding="utf8")
    (folder / "quiz.yaml").write_text(TASK.format(folder=folder), encoding="utf8")
    return folder


@pytest.fixture(scope="module")
def manager(quiz_folder: Path) -> TaskManager:
    return TaskManager(include_path=str(quiz_folder), include_defaults=False)


@pytest.fixture(scope="module")
def memory_folder(
    tiny_olmoe: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The folder of a memory of half the quiz's answers."""
    folder = tmp_path_factory.mktemp("memory") / "memory"
    memory = build_with_large_steps(tiny_olmoe, tiny_tokenizer, READ)
    memory.save_pretrained(folder)
    return str(folder)


def is_hooked(model: Any) -> bool:
    modules = list(model.modules())
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules]
    assert any(hooks) == any(find_hook(router) is not None for router in find_routers(model))
    return any(hooks)


@torch.no_grad()
def plain_scores(model: Any, tokenizer: Any) -> Scores:
    """Score one choice at a time, by hand."""
    likelihoods = torch.empty(len(QUIZ), 4)
    for row, (question, choices, _) in enumerate(QUIZ):
        context = f"Question: {question}\nAnswer:"
        start = len(tokenizer.encode(context))
        for column, choice in enumerate(choices):
            ids = torch.tensor([tokenizer.encode(f"{context} {choice}")])
            log = model(ids).logits[0, :-1].log_softmax(dim=-1)
            likelihoods[row, column] = log.gather(1, ids[0, 1:, None])[start - 1 :].sum()
    lengths = torch.tensor([[len(choice) for choice in choices] for _, choices, _ in QUIZ])
    gold = torch.tensor([gold for *_, gold in QUIZ])
    right = [(scores.argmax(dim=1) == gold) for scores in (likelihoods, likelihoods / lengths)]
    return Scores(likelihoods, *(answers.double().mean().item() for answers in right))


def run_harness(manager: TaskManager, model: Any, **options: Any) -> Scores:
    results = simple_evaluate(
        model, tasks=["quiz"], task_manager=manager, bootstrap_iters=0, **options
    )
    return read_scores(results["results"]["quiz"], results["samples"]["quiz"])


def read_scores(found: dict[str, float], samples: list[dict[str, Any]]) -> Scores:
    """Read what the harness returns, or what it writes: there, numbers are strings."""
    samples = sorted(samples, key=lambda sample: sample["doc_id"])
    likelihoods = [[float(chance) for chance, _ in sample["filtered_resps"]] for sample in samples]
    return Scores(torch.tensor(likelihoods), found["acc,none"], found["acc_norm,none"])


def assert_same(found: Scores, expected: Scores) -> None:
    # Sums over tokens, of up to 40 nats: fp32 rounds them in proportion to their size.
    torch.testing.assert_close(found.likelihoods, expected.likelihoods, rtol=1e-5, atol=1e-4)
    assert (found.acc, found.acc_norm) == (expected.acc, expected.acc_norm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "batch_size"), [("", 1), ("memory={},index=fast,k=1", 1), ("memory={}", 4)]
)
def test_the_harness_and_our_evaluation_score_as_plain_arithmetic(
    options: str,
    batch_size: int,
    manager: TaskManager,
    tiny_olmoe: Any,
    tiny_tokenizer: Any,
    memory_folder: str,
    tmp_path: Path,
) -> None:
    args = f"pretrained=tiny-olmoe,dtype=float32,{options.format(memory_folder)}".rstrip(",")
    found = run_harness(manager, "knn-moe", model_args=args, batch_size=batch_size, device="cpu")
    method: Method = ZeroShot()
    if options:
        memory = RoutingMemory.from_pretrained(memory_folder)
        fast = replace(memory.routing, k=1, index=IndexConfig(kind="fast"))
        method = KnnMoe(memory, fast if "k=1" in options else memory.routing)
    with method.apply_to(tiny_olmoe):
        assert_same(found, plain_scores(tiny_olmoe, tiny_tokenizer))
    rows = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUIZ]
    task = Task(name="quiz", title="Quiz", kind=Choice(), files="quiz")
    data = TaskData(task, rows, [], "made up")
    config = EvalConfig(scoring="likelihood", batch_size=4)
    run = evaluate(tiny_olmoe, tiny_tokenizer, data, method, config, folder=tmp_path / "run")
    samples = sorted(run.samples, key=lambda sample: int(sample.id))
    plain_score, score = (
        sum(getattr(sample, name) for sample in samples) / len(samples)
        for name in ("plain_score", "score")
    )
    likelihoods = torch.tensor([sample.likelihoods for sample in samples])
    assert_same(found, Scores(likelihoods, plain_score, score))


@pytest.mark.slow
def test_the_harness_takes_a_model_with_a_memory_attached(
    manager: TaskManager, tiny_olmoe: Any, tiny_tokenizer: Any, memory_folder: str
) -> None:
    base = plain_scores(tiny_olmoe, tiny_tokenizer)
    lm = HFLM(pretrained=tiny_olmoe, tokenizer=tiny_tokenizer, batch_size=4)
    with attach(tiny_olmoe, RoutingMemory.from_pretrained(memory_folder)):
        found = run_harness(manager, lm)
        assert_same(found, plain_scores(tiny_olmoe, tiny_tokenizer))
    assert not is_hooked(tiny_olmoe)
    assert (found.likelihoods - base.likelihoods).abs().max() > 0.1


@pytest.mark.slow
def test_the_command_evaluates_the_model(
    quiz_folder: Path,
    tiny_olmoe: Any,
    tiny_tokenizer: Any,
    memory_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without lm_eval's thousands of tasks, which take it seconds to list.
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    args = f"pretrained=tiny-olmoe,dtype=float32,memory={memory_folder},similarity=rbf,gamma=0.1"
    options = ["--model", "knn-moe", "--model_args", args, "--device", "cpu", "--log_samples"]
    options += ["--tasks", "quiz", "--include_path", quiz_folder, "--output_path", tmp_path]
    monkeypatch.setattr(sys, "argv", ["harness", *map(str, options)])
    runpy.run_module("knn_moe.harness", run_name="__main__")
    written = json.loads(next(tmp_path.rglob("results_*.json")).read_text(encoding="utf8"))
    lines = next(tmp_path.rglob("samples_*.jsonl")).read_text(encoding="utf8").splitlines()
    found = read_scores(written["results"]["quiz"], [json.loads(line) for line in lines])
    memory = RoutingMemory.from_pretrained(memory_folder)
    with attach(tiny_olmoe, memory, replace(memory.routing, gamma=0.1)):
        assert_same(found, plain_scores(tiny_olmoe, tiny_tokenizer))


def test_the_command_reports_our_errors_in_one_line(
    memory_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate() -> None:
        KnnMoeLM("tiny-olmoe", memory=memory_folder, index="fats")

    monkeypatch.setattr("knn_moe.evaluation.lm_eval.cli_evaluate", evaluate)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "Error: Unknown index 'fats'" in capsys.readouterr().err


def test_a_missing_harness_names_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.delitem(sys.modules, "knn_moe.evaluation.lm_eval")
    with pytest.raises(MissingDependencyError, match=r"pip install 'knn-moe\[eval\]'"):
        importlib.import_module("knn_moe.evaluation.lm_eval")


def test_a_control_has_no_language_model_head(
    tiny_olmoe: Any, tiny_tokenizer: Any, memory_folder: str, tmp_path: Path
) -> None:
    memory = RoutingMemory.from_pretrained(memory_folder)
    routing = replace(memory.routing, head=HeadConfig(k=4))
    replace(memory, manifest=replace(memory.manifest, routing=routing)).save_pretrained(
        tmp_path / "m"
    )
    for control, has in ((None, True), ("shuffled", False)):
        lm = KnnMoeLM(
            tiny_olmoe, memory=str(tmp_path / "m"), control=control, tokenizer=tiny_tokenizer
        )
        assert lm.routing is not None
        assert (lm.routing.config.head is not None) == has
        lm.routing.detach()


def test_bad_arguments_are_refused_before_the_model_is_loaded(memory_folder: str) -> None:
    with pytest.raises(ConfigError, match="Unknown index 'fats'"):
        KnnMoeLM("no/such-model", memory=memory_folder, index="fats")
    with pytest.raises(ConfigError, match=r"Unknown control 'randon'. Did you mean 'random'"):
        KnnMoeLM("no/such-model", memory=memory_folder, control="randon")
    with pytest.raises(ConfigError, match="control has no effect without a memory"):
        KnnMoeLM("no/such-model", control="random")
    with pytest.raises(ConfigError, match="k, index have no effect without a memory"):
        KnnMoeLM("no/such-model", k=1, index="fast")
    with pytest.raises(MemoryFormatError, match="No memory at 'no/such-memory'"):
        KnnMoeLM("no/such-model", memory="no/such-memory")


def test_a_memory_of_another_model_is_refused(
    tiny_olmoe: Any, tiny_tokenizer: Any, memory_folder: str
) -> None:
    with pytest.raises(MemoryMismatchError, match=r"This memory was built for .*tiny-olmoe"):
        KnnMoeLM("tiny-qwen3", memory=memory_folder, device="cpu", dtype="float32")
    memory = RoutingMemory.from_pretrained(memory_folder)
    with attach(tiny_olmoe, memory), pytest.raises(AttachError):
        KnnMoeLM(tiny_olmoe, memory=memory_folder, tokenizer=tiny_tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["detached", "deleted"])
def test_no_hook_is_left(
    end: str, tiny_olmoe: Any, tiny_tokenizer: Any, memory_folder: str
) -> None:
    lm = KnnMoeLM(tiny_olmoe, memory=memory_folder, tokenizer=tiny_tokenizer)
    assert is_hooked(tiny_olmoe)
    assert lm.routing is not None
    if end == "detached":
        lm.routing.detach()
    del lm
    gc.collect()
    assert not is_hooked(tiny_olmoe)
