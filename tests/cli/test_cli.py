"""The commands that make, show, change and use a memory: what they print and write."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.commands import assert_refused, run_cli
from helpers.zoo import TEXTS
from knn_moe import BuildConfig, RoutingMemory, build_memory
from knn_moe.cli.main import COMMANDS, main
from knn_moe.cli.reproduce import TablesByDefault
from knn_moe.support.progress import Progress


def run_json(*arguments: object) -> Any:
    result = run_cli(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def compressed_memory(saved_memory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `saved_memory`, compressed. Tests must not write into it."""
    folder = tmp_path_factory.mktemp("memories") / "compressed"
    assert run_cli("compress", saved_memory, "-o", folder).exit_code == 0
    return folder


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that `words` call, and its arguments."""
    command: click.Command = main
    while isinstance(command, click.Group):
        if isinstance(command, TablesByDefault) and words[:1] != ["pretrained"]:
            words = ["tables", *words]
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, words
        command, words = found, words[1:]
    return command, words


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_opens_with_examples_that_can_be_run(name: str) -> None:
    text = run_cli(*name.split(), "--help").output.split("Options:")[0].replace("\\\n", "")
    examples = [line.strip() for line in text.splitlines()[2:] if line.startswith("  knn-moe ")]
    assert any(line.startswith(f"knn-moe {name}".rstrip()) for line in examples), text
    for example in examples:
        command, arguments = find_command(shlex.split(example)[1:])
        context = click.Context(command, help_option_names=["-h", "--help"])
        command.make_parser(context).parse_args(arguments)


@pytest.mark.parametrize(
    "name", [*(name for name in COMMANDS if name != "bench"), "reproduce pretrained"]
)
def test_every_option_is_explained(name: str) -> None:
    command, _ = find_command(name.split())
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert [option.name for option in options if not (option.help or "").endswith(".")] == []


def test_help_needs_no_torch() -> None:
    modules = ", ".join(f"knn_moe.cli.{name}" for name in COMMANDS)
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_routers(saved_model: Path) -> None:
    shown = run_json("routers", saved_model)
    assert [router["layer"] for router in shown] == [0, 1]
    assert shown[0]["name"] == "model.layers.0.mlp.gate"
    assert "has 2 routers" in run_cli("routers", saved_model).stdout


def test_build_and_inspect(saved_memory: Path, saved_model: Path) -> None:
    facts = run_json("inspect", saved_memory)
    assert facts["cases"] == sum(len(text.split()) for text in TEXTS)
    assert facts["examples"] == len(TEXTS)
    assert facts["build"]["learning_rate"] == 5
    assert facts["base_model"]["name"] == str(saved_model)
    assert len(facts["layers"]) == 2
    shown = run_cli("inspect", saved_memory).stdout
    assert "OlmoeForCausalLM" in shown
    assert "typical distance" in shown


def test_building_again_needs_overwrite(
    saved_model: Path, reference_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "memory"
    build = ("build", saved_model, reference_file, "-o", folder)
    assert run_json(*build, "--steps", 0)["layers"] == [0, 1]
    assert_refused(run_cli(*build), "exists")
    assert run_cli(*build, "--overwrite", "--steps", 3).exit_code == 0
    assert RoutingMemory.from_pretrained(folder).build.steps == 3
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


def test_an_interrupted_build_is_resumed(
    saved_model: Path, reference_file: Path, tmp_path: Path
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.done > 100:
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


def test_generate(saved_model: Path, saved_memory: Path) -> None:
    generate = ("generate", saved_model, TEXTS[0], "--max-new-tokens", 6)
    answer = run_json(*generate, "--memory", saved_memory, "--compare")
    bare = run_json(*generate)
    assert answer["without_memory"] == bare["text"]
    assert len(answer["text"].split()) == 6
    assert answer["text"] != bare["text"]
    assert answer["layers"]["0"]["mean_confidence"] > 0.8  # this text is in the reference set
    sampled = [
        run_cli(*generate, "--memory", saved_memory, "--temperature", 1, "--seed", seed).stdout
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    assert "What the memory did" in sampled[0]


def test_compress_with_every_option(saved_memory: Path, tmp_path: Path) -> None:
    options = ("--bits", 8, "--value-bits", 4, "--probes", 3, "--dims", 128, "--rerank")
    compress = ("compress", saved_memory, "-o", tmp_path / "m", "--similarity", "cosine")
    facts = run_json(*compress, *options)
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
    kind: str,
    saved_model: Path,
    saved_memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = run_json("compress", saved_memory, "-o", tmp_path / "m", "--index", kind)
    assert {layer["index"]["kind"] for layer in made["layers"]} == {kind}
    generate = ("generate", saved_model, TEXTS[0], "--memory", tmp_path / "m")
    assert len(run_json(*generate, "--max-new-tokens", 2)["text"].split()) == 2
    monkeypatch.setitem(sys.modules, "faiss", None)
    again = run_cli("compress", saved_memory, "-o", tmp_path / "again", "--index", kind)
    assert_refused(again, "pip install faiss-cpu")
    assert_refused(run_cli(*generate), "pip install faiss-cpu")
    assert run_cli("inspect", tmp_path / "m").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_inspect_a_compressed_memory(compressed_memory: Path) -> None:
    facts = run_json("inspect", compressed_memory)
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
    generate = ("generate", saved_model, TEXTS[0], "--max-new-tokens", 3, "--memory")
    full, small = (run_json(*generate, path) for path in (saved_memory, compressed_memory))
    assert len(small["text"].split()) == 3
    full, small = full["layers"]["0"], small["layers"]["0"]
    assert small["tokens"] == full["tokens"]
    assert small["mean_confidence"] == pytest.approx(full["mean_confidence"], abs=0.1)


def test_compressing_again_or_merging_the_compressed(
    compressed_memory: Path, tmp_path: Path
) -> None:
    for command in ("compress", "merge"):
        result = run_cli(command, compressed_memory, "-o", tmp_path / "again")
        assert_refused(result, "made from")
    assert list(tmp_path.iterdir()) == []


def test_compressing_into_a_folder_that_exists(saved_memory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    shutil.copytree(saved_memory, folder)
    assert_refused(run_cli("compress", saved_memory, "-o", folder), "exists")
    assert_refused(run_cli("compress", saved_memory, "-o", tmp_path, "--overwrite"), "not a memory")
    assert not RoutingMemory.from_pretrained(folder).compressed
    made = run_cli("compress", folder, "-o", folder, "--overwrite")
    assert made.exit_code == 0, made.output
    assert "times smaller" in made.stderr
    routing = RoutingMemory.from_pretrained(folder).routing
    assert (routing.index.kind, routing.similarity) == ("fast", "rbf")
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]
