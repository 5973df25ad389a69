"""What attach and detach take: memories by name, models with a memory whose handle is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from knn_moe import RoutingMemory, attach, attach_all, detach
from knn_moe.errors import AttachError, ConfigError, MemoryFormatError


def assert_no_hooks(model: PreTrainedModel) -> None:
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.fixture
def folder(zoo_memory: RoutingMemory, tmp_path: Path) -> Path:
    zoo_memory.save_pretrained(tmp_path / "memory")
    return tmp_path / "memory"


def test_a_memory_is_attached_by_its_folder(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, folder: Path, prompt: torch.Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory):
        expected = zoo_olmoe(prompt, use_cache=False).logits
    for named in (folder, str(folder)):
        with attach(zoo_olmoe, named) as routing:
            assert torch.equal(zoo_olmoe(prompt, use_cache=False).logits, expected)
        assert routing.memory.folder == folder


def test_a_folder_below_the_home_is_found(
    zoo_olmoe: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    with attach(zoo_olmoe, "~/memory") as routing:
        assert routing.memory.folder == folder


def test_a_hub_id_is_downloaded(
    zoo_olmoe: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot_download(repo_id: str, revision: str | None = None) -> str:
        asked.append(repo_id)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with attach(zoo_olmoe, "somebody/memory") as routing:
        assert len(routing.memory)
    assert asked == ["somebody/memory"]


def test_several_memories_are_attached_by_their_folders(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, folder: Path, prompt: torch.Tensor
) -> None:
    with attach(zoo_olmoe, zoo_memory):
        expected = zoo_olmoe(prompt, use_cache=False).logits
    named = {"opened": zoo_memory, "folder": folder, "text": str(folder)}
    with attach_all(zoo_olmoe, named) as routing:
        for name in named:
            with routing.using(name):
                assert torch.equal(zoo_olmoe(prompt, use_cache=False).logits, expected)


def test_detach_finds_the_handle_that_was_not_kept(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    base = zoo_olmoe(prompt, use_cache=False).logits
    attach(zoo_olmoe, zoo_memory)
    assert not torch.equal(zoo_olmoe(prompt, use_cache=False).logits, base)
    detach(zoo_olmoe)
    assert torch.equal(zoo_olmoe(prompt, use_cache=False).logits, base)
    assert_no_hooks(zoo_olmoe)
    detach(zoo_olmoe)
    routing = attach(zoo_olmoe, zoo_memory)
    detach(zoo_olmoe)
    assert "detached" in repr(routing)
    routing.detach()


def test_detach_works_for_several_memories_empty_ones_and_wrappers(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    attach_all(zoo_olmoe, {"one": zoo_memory, "other": zoo_memory})
    detach(zoo_olmoe)
    assert_no_hooks(zoo_olmoe)
    attach(zoo_olmoe, zoo_memory.subset(torch.zeros(0, dtype=torch.int64)))
    detach(zoo_olmoe)
    assert_no_hooks(zoo_olmoe)
    attach(zoo_olmoe, zoo_memory)
    detach(torch.nn.ModuleList([zoo_olmoe]))
    assert_no_hooks(zoo_olmoe)


def test_what_is_no_memory_is_named(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, zoo_tokenizer: Any
) -> None:
    given: list[tuple[object, str]] = [
        (None, "None is neither"),
        ([zoo_memory], "a list of 1 is neither. For several memories there is attach_all"),
        ({"medicine": zoo_memory}, "a dict is neither. For several memories"),
        (zoo_tokenizer, f"{type(zoo_tokenizer).__name__} is neither"),
        (zoo_olmoe, "OlmoeForCausalLM is neither"),
        (7, r"7 \(of type int\) is neither"),
    ]
    for memory, words in given:
        with pytest.raises(AttachError, match=words):
            attach(zoo_olmoe, memory)  # type: ignore[arg-type]
    with pytest.raises(AttachError, match=r"memories by name.*a list of 1 is no such mapping"):
        attach_all(zoo_olmoe, [zoo_memory])  # type: ignore[arg-type]
    with pytest.raises(AttachError, match="None is neither"):
        attach_all(zoo_olmoe, {"one": None})  # type: ignore[dict-item]
    assert_no_hooks(zoo_olmoe)


def test_what_is_no_model_is_named(zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory) -> None:
    given: list[tuple[object, str]] = [
        (None, "None is none"),
        (zoo_memory, r"model comes first.*got RoutingMemory\("),
        ("tiny-olmoe", r"'tiny-olmoe' is a name.*load_model\('tiny-olmoe'\)"),
        ((zoo_olmoe, "tokenizer"), "a tuple of 2 is none. load_model returns two things"),
    ]
    for model, words in given:
        for call in (
            lambda model: attach(model, zoo_memory),
            lambda model: attach_all(model, {"one": zoo_memory}),
            detach,
        ):
            with pytest.raises(AttachError, match=words):
                call(model)  # type: ignore[arg-type]
    with pytest.raises(AttachError, match="model comes first"):
        attach(zoo_memory, zoo_olmoe)  # type: ignore[arg-type]


def test_other_arguments_are_named(zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory) -> None:
    with pytest.raises(AttachError, match=r"as a RoutingConfig says, and 'fast' "):
        attach(zoo_olmoe, zoo_memory, "fast")  # type: ignore[arg-type]
    with pytest.raises(AttachError, match=r"RoutingConfig says, and {'k': 3}"):
        attach_all(zoo_olmoe, {"one": zoo_memory}, {"one": {"k": 3}})  # type: ignore[dict-item]
    with pytest.raises(AttachError, match=r"named by texts, and 3 \(of type int\) is none"):
        attach_all(zoo_olmoe, {3: zoo_memory})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="at least one memory"):
        attach_all(zoo_olmoe, {})
    assert_no_hooks(zoo_olmoe)


def test_a_memory_that_is_not_there_is_named(
    zoo_olmoe: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> str:
        raise AssertionError("the hub was asked for a folder")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    nowhere = tmp_path / "nowhere"
    for named in (nowhere, str(nowhere), "./nowhere", "~/nowhere", Path("nowhere")):
        with pytest.raises(MemoryFormatError, match=r"No memory at '.*nowhere'.* no such folder"):
            attach(zoo_olmoe, named)
    nowhere.mkdir()
    with pytest.raises(MemoryFormatError, match="nowhere"):
        attach(zoo_olmoe, nowhere)
