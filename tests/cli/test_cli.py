"""The command line: what it prints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import TEXTS
from helpers.commands import assert_refused, run_cli
from knn_moe import BuildConfig, RoutingMemory, build_memory
from knn_moe.build.build import BuildProgress
from knn_moe.cli.main import COMMANDS


@pytest.fixture(scope="module")
def compressed_memory(saved_memory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memories") / "compressed"
    assert run_cli("compress", saved_memory, "-o", folder).exit_code == 0
    return folder


def test_help_opens_with_commands_one_can_run() -> None:
    assert "knn-moe build" in run_cli("--help").output.split("Options")[0]
    for name in COMMANDS:
        text = run_cli(name, "--help").output
        assert f"knn-moe {name} " in text.split("Options")[0].split("\n", 1)[1], name


def test_help_needs_no_torch() -> None:
    check = "import sys, knn_moe.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_routers(saved_model: Path) -> None:
    shown = json.loads(run_cli("routers", saved_model, "--json").stdout)
    assert [router["layer"] for router in shown] == [0, 1]
    assert shown[0]["name"] == "model.layers.0.mlp.gate"
    assert "has 2 routers" in run_cli("routers", saved_model).stdout


def test_build_and_inspect(saved_memory: Path, saved_model: Path) -> None:
    facts = json.loads(run_cli("inspect", saved_memory, "--json").stdout)
    assert facts["cases"] == sum(len(text.split()) for text in TEXTS)
    assert facts["examples"] == len(TEXTS)
    assert facts["build"]["learning_rate"] == 5
    assert facts["base_model"]["name"] == str(saved_model)
    assert len(facts["layers"]) == 2
    shown = run_cli("inspect", saved_memory).stdout
    assert "OlmoeForCausalLM" in shown
    assert "typical distance" in shown


def test_build_prints_json(saved_model: Path, reference_file: Path, tmp_path: Path) -> None:
    result = run_cli(
        "build", saved_model, reference_file, "-o", tmp_path / "m", "--json", "--steps", 0
    )
    assert json.loads(result.stdout)["layers"] == [0, 1]


def test_generate(saved_model: Path, saved_memory: Path) -> None:
    options = ("--memory", saved_memory, "--max-new-tokens", 6)
    answer = json.loads(
        run_cli("generate", saved_model, TEXTS[0], *options, "--compare", "--json").stdout
    )
    bare = json.loads(
        run_cli("generate", saved_model, TEXTS[0], "--max-new-tokens", 6, "--json").stdout
    )
    assert answer["without_memory"] == bare["text"]
    assert len(answer["text"].split()) == 6
    assert answer["text"] != bare["text"]
    assert answer["layers"]["0"]["mean_confidence"] > 0.8  # it has read this very text
    sampled = [
        run_cli(
            "generate", saved_model, TEXTS[0], *options, "--temperature", 1, "--seed", seed
        ).stdout
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    assert "What the memory did" in sampled[0]


def test_merge(saved_memory: Path, tmp_path: Path) -> None:
    result = run_cli("merge", saved_memory, saved_memory, "-o", tmp_path / "both", "--json")
    assert json.loads(result.stdout)["cases"] == 2 * len(
        RoutingMemory.from_pretrained(saved_memory)
    )


def test_compress(saved_memory: Path, tmp_path: Path) -> None:
    result = run_cli("compress", saved_memory, "-o", tmp_path / "fast")
    assert result.exit_code == 0, result.output
    for words in ("layer", "fast", "bytes per key", "recall", "λ error"):
        assert words in result.stdout
    assert "times smaller" in result.stderr
    made = RoutingMemory.from_pretrained(tmp_path / "fast")
    assert (made.routing.index.kind, made.routing.similarity) == ("fast", "rbf")
    assert [path.name for path in tmp_path.iterdir()] == ["fast"]


def test_compress_with_every_option(saved_memory: Path, tmp_path: Path) -> None:
    options = ("--bits", 8, "--value-bits", 4, "--probes", 3, "--dims", 128, "--rerank")
    result = run_cli(
        *(
            "compress",
            saved_memory,
            "-o",
            tmp_path / "m",
            "--similarity",
            "cosine",
            *options,
            "--json",
        )
    )
    facts = json.loads(result.stdout)
    made = RoutingMemory.from_pretrained(tmp_path / "m")
    assert facts["bytes"] == made.nbytes
    assert (
        facts["times_smaller"] == RoutingMemory.from_pretrained(saved_memory).nbytes / made.nbytes
    )
    assert [layer["layer"] for layer in facts["layers"]] == [0, 1]
    index = {"kind": "fast", "probes": 3, "dims": 128, "bits": 8, "value_bits": 4, "rerank": True}
    assert facts["layers"][1]["index"] == made.routing.index.to_dict() == index
    assert made.routing.similarity == "cosine"


@pytest.mark.parametrize("kind", ["ivfpq", "faiss-flat"])
def test_compress_with_faiss(
    kind: str, saved_model: Path, saved_memory: Path, tmp_path: Path
) -> None:
    made = run_cli("compress", saved_memory, "-o", tmp_path / "m", "--index", kind, "--json")
    assert {layer["index"]["kind"] for layer in json.loads(made.stdout)["layers"]} == {kind}
    options = ("--memory", tmp_path / "m", "--max-new-tokens", 2, "--json")
    answer = json.loads(run_cli("generate", saved_model, TEXTS[0], *options).stdout)
    assert len(answer["text"].split()) == 2


def test_inspect_a_compressed_memory(compressed_memory: Path) -> None:
    facts = json.loads(run_cli("inspect", compressed_memory, "--json").stdout)
    made = RoutingMemory.from_pretrained(compressed_memory)
    assert facts["bytes"] == made.nbytes
    assert facts["routing"]["index"]["kind"] == "fast"
    for number, layer in enumerate(facts["layers"]):
        known = made.layers[number]
        assert layer["bytes_per_case"] == known.bytes_per_case == known.nbytes / len(made)
        assert layer["quality"]["recall"] == known.quality.recall > 0.8
        assert layer["quality"]["confidence_error"] == known.quality.confidence_error < 0.05
    shown = run_cli("inspect", compressed_memory).stdout
    for words in ("bytes per key", "recall", "λ error", "index kind fast"):
        assert words in shown
    assert f"{made.layers[0].bytes_per_case:.1f}" in shown
    assert f"{made.layers[0].quality.recall:.3f}" in shown


def test_generate_with_a_compressed_memory(
    saved_model: Path, saved_memory: Path, compressed_memory: Path
) -> None:
    def layers(folder: Path) -> dict[str, dict[str, float]]:
        options = ("--memory", folder, "--max-new-tokens", 3, "--json")
        answer = json.loads(run_cli("generate", saved_model, TEXTS[0], *options).stdout)
        assert len(answer["text"].split()) == 3
        return answer["layers"]

    full, small = layers(saved_memory)["0"], layers(compressed_memory)["0"]
    assert small["tokens"] == full["tokens"]
    assert small["mean_confidence"] == pytest.approx(full["mean_confidence"], abs=0.1)


def test_compressing_again_or_merging_the_compressed(
    compressed_memory: Path, tmp_path: Path
) -> None:
    for command in ("compress", "merge"):
        result = run_cli(command, compressed_memory, "-o", tmp_path / "again")
        assert_refused(result, "use the memory that it was compressed from")
    assert list(tmp_path.iterdir()) == []


def test_compressing_over_something(
    saved_memory: Path, reference_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "memory"
    shutil.copytree(saved_memory, folder)
    assert_refused(run_cli("compress", saved_memory, "-o", folder), "exists already")
    assert_refused(run_cli("compress", saved_memory, "-o", tmp_path, "--overwrite"), "is no memory")
    assert not RoutingMemory.from_pretrained(folder).compressed
    assert run_cli("compress", folder, "-o", folder, "--overwrite").exit_code == 0
    assert RoutingMemory.from_pretrained(folder).compressed
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


def test_compressing_without_faiss(
    saved_model: Path, saved_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        run_cli("compress", saved_memory, "-o", tmp_path / "m", "--index", "ivfpq").exit_code == 0
    )
    monkeypatch.setitem(sys.modules, "faiss", None)
    again = run_cli("compress", saved_memory, "-o", tmp_path / "again", "--index", "ivfpq")
    assert_refused(again, "pip install faiss-cpu")
    assert_refused(
        run_cli("generate", saved_model, "3 4", "--memory", tmp_path / "m"), "pip install faiss-cpu"
    )
    assert run_cli("inspect", tmp_path / "m").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_bench_prints_ratios() -> None:
    options = ("--sequences", 6, "--length", 12, "--plain-sequences", 2, "--grow", 9, "--json")
    rows = json.loads(run_cli("bench", "build", *options).stdout)
    assert [row["way"].split(",")[0] for row in rows] == [
        "plain: one sequence at a time",
        "model only",
        "end to end",
        "end to end",
    ]
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_overwriting(saved_model: Path, reference_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    build = ("build", saved_model, reference_file, "-o", folder)
    assert run_cli(*build).exit_code == 0
    assert_refused(run_cli(*build), "exists already")
    assert run_cli(*build, "--overwrite", "--steps", 3).exit_code == 0
    assert RoutingMemory.from_pretrained(folder).build.steps == 3
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


def test_an_interrupted_build_is_resumed(
    saved_model: Path, reference_file: Path, tmp_path: Path
) -> None:
    def interrupt(progress: BuildProgress) -> None:
        if progress.tokens > 100:
            raise KeyboardInterrupt

    folder = tmp_path / "memory"
    with pytest.raises(KeyboardInterrupt):
        build_memory(
            AutoModelForCausalLM.from_pretrained(saved_model),
            AutoTokenizer.from_pretrained(saved_model),
            reference_file,
            BuildConfig(batch_tokens=16),
            folder=folder,
            on_progress=interrupt,
        )
    build = ("build", saved_model, reference_file, "-o", folder, "--batch-tokens", 16)
    assert_refused(run_cli(*build), "--resume")
    assert run_cli(*build, "--resume").exit_code == 0
    assert run_cli("inspect", folder).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]
