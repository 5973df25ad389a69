"""lm-evaluation-harness: its numbers with a memory are those of plain arithmetic on the model."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from knn_moe import (
    BuildConfig,
    HeadConfig,
    IndexConfig,
    RoutingMemory,
    attach,
    build_memory,
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
from knn_moe.methods import KnnMoe, ZeroShot
from knn_moe.routers.intercept import find_hook
from knn_moe.support.embedded_models import embedded_model
from knn_moe.tasks import Choice, Task, TaskData

pytestmark = pytest.mark.usefixtures("offline")

REMEMBERED = [
    ("Which planet is nearest to the sun?", ["Venus", "Mercury", "the Earth", "Mars"], 1),
    ("What gas do plants take from the air?", ["oxygen", "carbon dioxide", "helium", "neon"], 1),
    ("How many legs has a spider?", ["six", "eight", "ten", "twelve"], 1),
    ("What is frozen water called?", ["ice", "steam", "dew", "a cloud of very small drops"], 0),
    ("Which organ pumps the blood?", ["the liver", "a lung", "the skin", "the heart"], 3),
    ("What do bees make?", ["silk", "milk", "honey", "paper money"], 2),
]
NEW = [
    ("Which metal is liquid at room temperature?", ["iron", "gold", "mercury", "tin"], 2),
    ("Where does a river end?", ["at its source", "in the sea", "on a hill", "in a cave"], 1),
    ("What pulls a falling stone down?", ["wind", "light", "gravity", "its own colour"], 2),
    ("Which season follows the winter?", ["spring", "summer", "autumn", "another winter"], 0),
    ("Who wrote the play Hamlet?", ["Newton", "Shakespeare", "Mozart", "Columbus"], 1),
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
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What huggingface_hub and datasets read from the environment when they are imported."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
        patch.setattr("datasets.config.HF_MODULES_CACHE", str(home / "modules"))
        patch.setenv("HF_HOME", str(home))  # of the command's own process
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task for the harness, and its data."""
    folder = tmp_path_factory.mktemp("quiz")
    rows = [dict(zip(("question", "choices", "gold"), row, strict=True)) for row in QUIZ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "quiz.jsonl").write_text(text, encoding="utf8")
    (folder / "quiz.yaml").write_text(TASK.format(folder=folder), encoding="utf8")
    return folder


@pytest.fixture(scope="module")
def manager(quiz: Path) -> TaskManager:
    return TaskManager(include_path=str(quiz), include_defaults=False)


@pytest.fixture(scope="module")
def words() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model("tiny-olmoe"))


@pytest.fixture
def network() -> Any:
    return load("tiny-olmoe")


@pytest.fixture(scope="module")
def remembered(words: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a memory of half the quiz's answers."""
    folder = tmp_path_factory.mktemp("remembered") / "memory"
    built = build_memory(load("tiny-olmoe"), words, READ, BuildConfig(preset="strong"))
    built.save_pretrained(folder)
    return str(folder)


def load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded_model(name), dtype=torch.float32).eval()


def hooked(network: Any) -> bool:
    modules = list(network.modules())
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules]
    assert any(hooks) == any(find_hook(router) for router in find_routers(network))
    return any(hooks)


@torch.no_grad()
def plain(network: Any, words: Any) -> Scores:
    """By hand, one choice at a time."""
    likelihoods = torch.empty(len(QUIZ), 4)
    for row, (question, choices, _) in enumerate(QUIZ):
        context = f"Question: {question}\nAnswer:"
        start = len(words.encode(context))
        for place, choice in enumerate(choices):
            ids = torch.tensor(words.encode(f"{context} {choice}"))
            chances = network(ids[None]).logits[0].log_softmax(dim=-1)
            likelihoods[row, place] = sum(chances[at - 1, ids[at]] for at in range(start, len(ids)))
    lengths = torch.tensor([[len(choice) for choice in choices] for _, choices, _ in QUIZ])
    gold = torch.tensor([gold for *_, gold in QUIZ])
    right = [(scores.argmax(dim=1) == gold) for scores in (likelihoods, likelihoods / lengths)]
    return Scores(likelihoods, *(answers.double().mean().item() for answers in right))


def harness(manager: TaskManager, model: Any, **settings: Any) -> Scores:
    results = simple_evaluate(
        model, tasks=["quiz"], task_manager=manager, bootstrap_iters=0, **settings
    )
    return as_scores(results["results"]["quiz"], results["samples"]["quiz"])


def as_scores(found: dict[str, float], samples: list[dict[str, Any]]) -> Scores:
    """From what the harness hands back, or from what it wrote: there numbers are strings."""
    samples = sorted(samples, key=lambda sample: sample["doc_id"])
    likelihoods = [[float(chance) for chance, _ in sample["filtered_resps"]] for sample in samples]
    return Scores(torch.tensor(likelihoods), found["acc,none"], found["acc_norm,none"])


def assert_same(found: Scores, expected: Scores) -> None:
    torch.testing.assert_close(found.likelihoods, expected.likelihoods, rtol=0, atol=1e-4)
    assert (found.acc, found.acc_norm) == (expected.acc, expected.acc_norm)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("settings", ["", "memory={},index=fast,k=1", "memory={}"])
def test_the_harness_scores_as_plain_arithmetic_does(
    settings: str, batch_size: int, manager: TaskManager, network: Any, words: Any, remembered: str
) -> None:
    args = f"pretrained=tiny-olmoe,dtype=float32,{settings.format(remembered)}".rstrip(",")
    found = harness(manager, "knn-moe", model_args=args, batch_size=batch_size, device="cpu")
    if settings:
        memory = RoutingMemory.from_pretrained(remembered)
        strong = memory.routing
        chosen = replace(strong, k=1, index=IndexConfig(kind="fast"))
        attach(network, memory, chosen if "k=1" in settings else strong)
    assert_same(found, plain(network, words))


def test_a_model_with_a_memory_can_be_given(
    manager: TaskManager, network: Any, words: Any, remembered: str
) -> None:
    without = plain(network, words)
    with attach(network, RoutingMemory.from_pretrained(remembered)):
        given = HFLM(pretrained=network, tokenizer=words, batch_size=4)
        found = harness(manager, given)
        assert_same(found, plain(network, words))
    assert not hooked(network)
    assert (found.likelihoods - without.likelihoods).abs().max() > 0.1
    assert_same(harness(manager, given), without)


def test_the_command_runs_with_the_model(
    quiz: Path, network: Any, words: Any, remembered: str, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "knn_moe.evaluation.lm_eval",
        "--model",
        "knn-moe",
        "--model_args",
    ]
    command += [f"pretrained=tiny-olmoe,dtype=float32,memory={remembered},similarity=rbf,gamma=0.1"]
    command += ["--tasks", "quiz", "--include_path", str(quiz), "--output_path", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--device", "cpu", "--log_samples"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(next(tmp_path.rglob("results_*.json")).read_text(encoding="utf8"))
    lines = next(tmp_path.rglob("samples_*.jsonl")).read_text(encoding="utf8").splitlines()
    memory = RoutingMemory.from_pretrained(remembered)
    attach(network, memory, replace(memory.routing, gamma=0.1))
    found = as_scores(written["results"]["quiz"], [json.loads(line) for line in lines])
    assert_same(found, plain(network, words))


@pytest.mark.parametrize("memory", [False, True])
def test_our_own_evaluation_gives_the_same(
    memory: bool, manager: TaskManager, network: Any, words: Any, remembered: str, tmp_path: Path
) -> None:
    rows = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUIZ]
    task = Task(name="quiz", title="Quiz", kind=Choice(), files="quiz")
    method = KnnMoe(RoutingMemory.from_pretrained(remembered)) if memory else ZeroShot()
    config = EvalConfig(scoring="likelihood", batch_size=4)
    data = TaskData(task, rows, [], "made up")
    run = evaluate(network, words, data, method, config, folder=tmp_path / "run")
    samples = sorted(run.samples, key=lambda sample: int(sample.id))
    plain_score, score = (
        sum(getattr(sample, name) for sample in samples) / len(samples)
        for name in ("plain_score", "score")
    )
    likelihoods = torch.tensor([sample.likelihoods for sample in samples])
    args = f"pretrained=tiny-olmoe,dtype=float32{f',memory={remembered}' if memory else ''}"
    found = harness(manager, "knn-moe", model_args=args, batch_size=4, device="cpu")
    assert_same(found, Scores(likelihoods, plain_score, score))


def test_the_command_tells_our_errors_in_a_line(
    remembered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate() -> None:
        KnnMoeLM("tiny-olmoe", memory=remembered, index="fats")

    monkeypatch.setattr("knn_moe.evaluation.lm_eval.cli_evaluate", evaluate)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "Error: Unknown index 'fats'" in capsys.readouterr().err


def test_a_missing_harness_names_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.delitem(sys.modules, "knn_moe.evaluation.lm_eval")
    with pytest.raises(MissingDependencyError, match=r"pip install 'knn-moe\[eval\]'"):
        importlib.import_module("knn_moe.evaluation.lm_eval")


def test_a_control_has_no_head(remembered: str, tmp_path: Path) -> None:
    memory = RoutingMemory.from_pretrained(remembered)
    routing = replace(memory.routing, head=HeadConfig(k=4))
    replace(memory, manifest=replace(memory.manifest, routing=routing)).save_pretrained(
        tmp_path / "m"
    )
    for control, has in ((None, True), ("shuffled", False)):
        lm = KnnMoeLM("tiny-olmoe", memory=str(tmp_path / "m"), control=control, device="cpu")
        assert lm.routing is not None
        assert (lm.routing.config.head is not None) == has
        lm.routing.detach()


def test_settings_are_refused_before_the_model_is_loaded(remembered: str) -> None:
    with pytest.raises(ConfigError, match="Unknown index 'fats'"):
        KnnMoeLM("no/such-model", memory=remembered, index="fats")
    with pytest.raises(ConfigError, match=r"Unknown control 'randon'. Did you mean 'random'"):
        KnnMoeLM("no/such-model", memory=remembered, control="randon")
    with pytest.raises(ConfigError, match="control of no memory: give memory="):
        KnnMoeLM("no/such-model", control="random")
    with pytest.raises(ConfigError, match="k, index of no memory: give memory="):
        KnnMoeLM("no/such-model", k=1, index="fast")
    with pytest.raises(MemoryFormatError, match="No memory at 'no/such-memory'"):
        KnnMoeLM("no/such-model", memory="no/such-memory")


def test_a_memory_of_another_model_is_refused(network: Any, words: Any, remembered: str) -> None:
    with pytest.raises(MemoryMismatchError, match=r"This memory was built for .*tiny-olmoe"):
        KnnMoeLM("tiny-qwen3", memory=remembered, device="cpu", dtype="float32")
    with attach(network, RoutingMemory.from_pretrained(remembered)), pytest.raises(AttachError):
        KnnMoeLM(network, memory=remembered, tokenizer=words)


@pytest.mark.parametrize("end", ["detached", "deleted"])
def test_no_hook_is_left(
    end: str, manager: TaskManager, network: Any, words: Any, remembered: str
) -> None:
    given = KnnMoeLM(network, memory=remembered, tokenizer=words)
    harness(manager, given, limit=1)
    assert hooked(network)
    assert given.routing is not None
    if end == "detached":
        given.routing.detach()
    del given
    gc.collect()
    assert not hooked(network)
