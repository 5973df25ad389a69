"""The command line: how it says no."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import assert_refused, run_cli, save_model
from knn_moe import RoutingMemory
from knn_moe.bench.models import number_tokenizer


def write(text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "ref.jsonl"
        path.write_text(text)
        return path

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (write(""), "is empty"),
        (write('{"text": "3 4"}\n{"text": 3 4}\n'), "line 2: not JSON"),
        (write('{"question": "3 4"}\n'), "line 1: needs"),
        (lambda folder: folder / "none.jsonl", "No file of examples"),
        (lambda folder: folder, "No file of examples"),
    ],
)
def test_a_bad_reference_file_is_told(
    make: Callable[[Path], Path], says: str, saved_model: Path, tmp_path: Path
) -> None:
    path = make(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert_refused(run_cli("build", saved_model, path, "-o", tmp_path / "memory"), says)
    assert sorted(tmp_path.iterdir()) == before


def test_no_such_model(
    reference_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    nowhere = tmp_path / "nowhere"
    for arguments in (
        ("routers", nowhere),
        ("build", nowhere, reference_file, "-o", tmp_path / "m"),
    ):
        assert_refused(run_cli(*arguments), "Cannot load a causal language model", "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_routers(reference_file: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(tmp_path / "llama")
    number_tokenizer(128).save_pretrained(tmp_path / "llama")
    assert_refused(run_cli("routers", tmp_path / "llama"), "LlamaForCausalLM has no router")
    build = run_cli("build", tmp_path / "llama", reference_file, "-o", tmp_path / "memory")
    assert_refused(build, "LlamaForCausalLM has no router")
    assert not (tmp_path / "memory").exists()


def test_a_model_that_outgrows_memory(
    saved_model: Path, reference_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knn_moe.cli.common.available_memory", lambda: 1000)
    build = run_cli("build", saved_model, reference_file, "-o", tmp_path / "memory")
    assert_refused(build, "GB of weights", "Use a machine with more memory")
    assert list(tmp_path.iterdir()) == []


def test_another_models_memory(saved_memory: Path, tmp_path: Path) -> None:
    other = save_model("qwen3_moe", tmp_path / "other")
    result = run_cli("generate", other, "3 4 5", "--memory", saved_memory)
    assert_refused(result, "OlmoeForCausalLM", "Qwen3MoeForCausalLM")


def test_a_truncated_memory(saved_memory: Path, saved_model: Path, tmp_path: Path) -> None:
    RoutingMemory.from_pretrained(saved_memory).save_pretrained(tmp_path / "broken")
    path = tmp_path / "broken" / "layer-001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for arguments in (("inspect",), ("generate", saved_model, "3 4", "--memory")):
        assert_refused(run_cli(*arguments, tmp_path / "broken"), "layer-001", "truncated")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--preset", "magic"), "Unknown preset 'magic'"),
        (("--gradient", "steep"), "Unknown gradient"),
        (("--learning-rate", -1), "learning_rate must be positive"),
        (("--device", "abacus"), "abacus"),
        (("--device", "cuda:77"), "cuda:77"),
    ],
)
def test_bad_settings(
    option: tuple[object, ...], says: str, saved_model: Path, reference_file: Path, tmp_path: Path
) -> None:
    assert_refused(
        run_cli("build", saved_model, reference_file, "-o", tmp_path / "memory", *option), says
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "MODEL", ""), "The prompt has no tokens"),
        (("generate", "MODEL", "3", "--chat"), "no chat template"),
        (("generate", "MODEL", "3", "--temperature", -1), "-1"),
        (("generate", "MODEL", "3", "--max-new-tokens", 0), "0"),
        (("generate", "MODEL", "3", "--compare"), "--compare needs a --memory"),
        (("generate", "MODEL", "3", "--device", "meta"), "meta"),
        (("build", "MODEL", "REF", "-o", "REF/memory"), "Not a directory"),
        (("merge", "MEMORY", "-o", "REF/memory"), "Cannot read or write"),
        (("inspect", "REF"), "No memory at"),
        (("compress", "REF", "-o", "MEMORY/x"), "No memory at"),
        (("compress", "MODEL", "-o", "MEMORY/x"), "is no memory"),
        (("compress", "MEMORY", "-o", "REF/x"), "Cannot read or write"),
        (("compress", "MEMORY", "-o", "MEMORY/x", "--index", "hnsw"), "'hnsw' is not one of"),
        (("compress", "MEMORY", "-o", "MEMORY/x", "--index", "exact"), "'exact' is not one of"),
        (("compress", "MEMORY", "-o", "MEMORY/x", "--bits", 5), "bits must be 4 or 8, got 5"),
        (("compress", "MEMORY", "-o", "MEMORY/x", "--value-bits", 2), "value_bits must be 4 or 8"),
        (("compress", "MEMORY", "-o", "MEMORY/x", "--dims", 50), "a multiple of 64, got 50"),
        (("compress", "MEMORY", "-o", "MEMORY/x", "--dims", 0), "dims must be a whole number"),
        (("compress", "MEMORY", "-o", "MEMORY/x", "--probes", 0), "probes must be a whole number"),
        (("compress", "MEMORY", "-o", "MEMORY/x", "--similarity", "l2"), "Unknown similarity"),
        (("compress", "MEMORY", "-o", "MEMORY/x", "--device", "abacus"), "abacus"),
        (("bench", "build", "--grow", "many"), "many"),
        (("bench", "build", "--dtype", "int8"), "int8"),
        (("demo", "--tokens", 0), "0"),
        (("demo", "--out", "MODEL"), "holds something else than a demo"),
    ],
)
def test_wrong_calls(
    arguments: tuple[object, ...],
    says: str,
    saved_model: Path,
    reference_file: Path,
    saved_memory: Path,
) -> None:
    places = {"MODEL": saved_model, "REF": reference_file, "MEMORY": saved_memory}
    for name, path in places.items():
        arguments = tuple(
            str(part).replace(name, str(path)) if isinstance(part, str) else part
            for part in arguments
        )
    before = sorted(saved_memory.iterdir())
    assert_refused(run_cli(*arguments), says)
    assert sorted(saved_memory.iterdir()) == before


def test_broken_weights(saved_model: Path, reference_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(saved_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    build = run_cli("build", broken, reference_file, "-o", tmp_path / "memory")
    assert_refused(build, "Cannot load a causal language model")
    assert not (tmp_path / "memory.partial").exists()


def test_a_bad_line_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    reference = tmp_path / "ref.jsonl"
    reference.write_text('{"text": "3"}\n' * 5 + "oops\n")
    build = run_cli("build", tmp_path / "no-model", reference, "-o", tmp_path / "memory")
    assert_refused(build, "line 6: not JSON")


def test_an_unknown_shape() -> None:
    assert_refused(run_cli("bench", "build", "--shape", "llama"), "Unknown shape", "olmoe-1b-7b")
