"""Bad input ends with exit code 2 and one clear sentence, and leaves nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.commands import assert_refused, run_cli, save_model
from knn_moe import RoutingMemory
from knn_moe.bench.models import number_tokenizer
from knn_moe.support.given import kind_of_place


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"text": "3 4"}\n{"text": 3 4}\n', "line 2: not JSON"),
        ('{"body": "3 4"}\n', "line 1: needs"),
        ('{"body": "3 4"}\n', "has 'body' (str). Say which column is which with --column"),
        (None, "There is no file or folder"),
    ],
)
def test_a_bad_reference_file(
    text: str | None, message: str, saved_model: Path, tmp_path: Path
) -> None:
    reference = tmp_path / "ref.jsonl"
    if text is not None:
        reference.write_text(text)
    before = list(tmp_path.iterdir())
    for model in (saved_model, tmp_path / "no-model"):  # refused before the model is loaded
        assert_refused(run_cli("build", model, reference, "-o", tmp_path / "memory"), message)
    assert list(tmp_path.iterdir()) == before


def test_a_folder_without_examples(saved_model: Path, tmp_path: Path) -> None:
    result = run_cli("build", saved_model, tmp_path, "-o", tmp_path / "memory")
    assert_refused(result, "holds no examples", ".jsonl, .json")


def test_no_such_model(
    reference_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    nowhere = tmp_path / "nowhere"
    build = ("build", nowhere, reference_file, "-o", tmp_path / "m")
    for arguments in (("routers", nowhere), build):
        assert_refused(run_cli(*arguments), "Cannot load a causal language model", "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_memory_of_the_hub_is_asked_for_there(
    reference_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    out = ("-o", tmp_path / "out")
    append = ("build", "tiny-olmoe", reference_file, "--append", "org/memory", *out)
    for arguments in (("calibrate", "tiny-olmoe", "org/memory", *out), append):
        assert_refused(run_cli(*arguments), "'org/memory'", "the hub cannot be reached")
    assert not (tmp_path / "out").exists()


def test_a_model_without_routers(reference_file: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama = tmp_path / "llama"
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(llama)
    number_tokenizer(128).save_pretrained(llama)
    for arguments in (("routers", llama), ("build", llama, reference_file, "-o", tmp_path / "m")):
        assert_refused(run_cli(*arguments), "LlamaForCausalLM has no router")
    assert not (tmp_path / "m").exists()


def test_a_model_larger_than_the_memory(
    saved_model: Path, reference_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knn_moe.routers.load.available_memory", lambda: 1000)
    build = run_cli("build", saved_model, reference_file, "-o", tmp_path / "memory")
    assert_refused(build, "GB of weights", "Use a machine with more memory")
    assert list(tmp_path.iterdir()) == []


def test_broken_weights(saved_model: Path, reference_file: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(saved_model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    build = run_cli("build", broken, reference_file, "-o", tmp_path / "memory")
    assert_refused(build, "Cannot load a causal language model")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_the_memory_of_another_model(saved_memory: Path, tmp_path: Path) -> None:
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
    ("command", "message"),
    [
        ("biuld MODEL REF -o OUT", "Unknown command 'biuld'. Did you mean 'build'?"),
        ("build MODEL REF -o OUT --preset magic", "Unknown preset 'magic'"),
        ("build MODEL REF -o OUT --preset strong", "use `--calibrate`"),
        ("build MODEL REF -o OUT --gradient steep", "Unknown gradient"),
        ("build MODEL REF -o OUT --learning-rate -1", "learning_rate must be positive"),
        ("build MODEL REF -o OUT --device abacus", "no such kind of device"),
        ("label MODEL REF -o OUT.jsonl --samples 4", "--samples is for --by agreement"),
        ("build MODEL REF -o OUT --device cuda:77", "cuda:77"),
        ("build MODEL REF -o OUT --head", "Add --calibrate"),
        ("build MODEL REF -o OUT --split none", "Only plain text is split"),
        ("build MODEL REF -o OUT --column text", "--column needs FIELD=COLUMN"),
        ("build MODEL REF -o OUT --column text=a --column text=b", "names a field twice"),
        ("build MODEL REF -o OUT --column body=text", "There is no field 'body'"),
        ("build MODEL REF -o OUT --column text=body", "has no column 'body'"),
        ("build MODEL REF -o OUT --format xml", "Unknown format 'xml'"),
        ("calibrate MODEL MEMORY --dry-run --split none", "need a REFERENCE"),
        ("build MODEL REF -o REF/memory", "Not a directory"),
        ("generate MODEL EMPTY", "The prompt has no tokens"),
        ("generate MODEL 3 --chat", "no chat template"),
        ("generate MODEL 3 --temperature -1", "-1"),
        ("generate MODEL 3 --max-new-tokens 0", "0"),
        ("generate MODEL 3 --compare", "--compare needs a --memory"),
        ("generate MODEL 3 --seed -1", "A seed is from 0"),
        ("generate MODEL 3 --seed 9223372036854775808", "A seed is from 0"),
        ("generate MODEL 3 -k 3", "-k needs a --memory"),
        ("chat MODEL -k 3", "-k needs a --memory"),
        ("routers REF", "It is a file"),
        ("routers MEMORY", "It is a memory"),
        ("routers EMPTY", "The name is empty"),
        ("build REF MODEL -o OUT", "is a model, not a reference set"),
        ("build MODEL MEMORY -o OUT", "is a memory, not a reference set"),
        ("build MODEL tiny-olmoe -o OUT", "is a model, not a reference set"),
        ("build MODEL REF -o OUT --append MEMORY", "exactly these examples already"),
        ("build MODEL REF -o MEMORY", "or overwrite it with --overwrite"),
        ("generate MODEL 3 --control random", "--control needs a --memory"),
        ("generate MODEL 3 --device meta", "meta"),
        ("merge MEMORY -o REF/memory", "Cannot read or write"),
        ("inspect REF", "No memory at"),
        ("compress REF -o OUT", "No memory at"),
        ("compress MODEL -o OUT", "is not a memory"),
        ("compress MEMORY -o REF/x", "Cannot read or write"),
        ("compress MEMORY -o OUT --index hnsw", "'hnsw' is not one of"),
        ("compress MEMORY -o OUT --index exact", "'exact' is not one of"),
        ("compress MEMORY -o OUT --bits 5", "bits must be 4 or 8, got 5"),
        ("compress MEMORY -o OUT --value-bits 2", "value_bits must be 4 or 8"),
        ("compress MEMORY -o OUT --dims 50", "a multiple of 64, got 50"),
        ("compress MEMORY -o OUT --dims 0", "dims must be a whole number"),
        ("compress MEMORY -o OUT --probes 0", "probes must be a whole number"),
        ("compress MEMORY -o OUT --index ivfpq --bits 4", "--bits has no effect on --index ivfpq"),
        ("compress MEMORY -o OUT --index faiss-flat --rerank", "--rerank has no effect"),
        ("compress tiny-olmoe -o OUT", "it is a model"),
        ("compress MEMORY -o OUT --similarity l2", "Unknown similarity"),
        ("compress MEMORY -o OUT --device abacus", "abacus"),
        ("prune MEMORY -o OUT", "Pruning by loss needs the model"),
        ("prune MODEL MEMORY -o OUT --by chance", "uses no model"),
        ("explain MODEL 3", "Missing option '--memory'"),
        ("explain MODEL 3 --memory REF", "No memory at"),
        ("explain MODEL 3 --memory MEMORY --layer 7", "layer 7"),
        ("explain MODEL 3 --memory MEMORY --tokens 0", "0"),
        ("explain MODEL 3 --memory MEMORY --max-new-tokens -1", "-1"),
        ("explain MODEL 3 --memory MEMORY -k 0", "k must be a whole number of at least 1"),
        ("explain MODEL 3 --memory MEMORY --chat", "no chat template"),
        ("explain MODEL EMPTY --memory MEMORY -o OUT", "The prompt has no tokens"),
        ("explain MODEL 3 --memory MEMORY -o OUT/no/page.html", "There is no folder"),
        ("explain MODEL 3 --memory MEMORY -o MEMORY", "is a directory"),
        ("bench build --grow many", "many"),
        ("bench build --dtype int8", "int8"),
        ("bench build --shape llama", "Unknown shape"),
        ("demo --tokens 0", "0"),
        ("demo --out MODEL", "demo"),
    ],
)
def test_bad_options(
    command: str,
    message: str,
    saved_model: Path,
    reference_file: Path,
    saved_memory: Path,
    tmp_path: Path,
) -> None:
    places = {"MODEL": saved_model, "REF": reference_file, "MEMORY": saved_memory}
    for name, path in (*places.items(), ("OUT", tmp_path / "out")):
        command = command.replace(name, str(path))
    before = sorted(saved_memory.iterdir())
    assert_refused(run_cli(*(word.replace("EMPTY", "") for word in command.split())), message)
    assert sorted(saved_memory.iterdir()) == before
    assert list(tmp_path.iterdir()) == []


def test_places_are_told_from_each_other(saved_memory: Path, saved_model: Path) -> None:
    kinds = (saved_memory, saved_model, "tiny-olmoe", saved_model / "config.json", "nowhere")
    expected = ["a memory", "a model", "a model", "a file", None]
    assert [kind_of_place(place) for place in kinds] == expected
