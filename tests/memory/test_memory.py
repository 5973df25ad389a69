"""The artefact: saved, opened, merged, published; refused when it is not what it says."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.zoo import encode, family, make_texts
from knn_moe import BuildConfig, RoutingMemory, attach, build_memory
from knn_moe.errors import MemoryFormatError, MemoryMismatchError
from knn_moe.reference.provenance import Provenance
from knn_moe.support.folders import put_in_place

TEXTS = make_texts(8)
CONFIG = BuildConfig(learning_rate=2.0, steps=2)


@pytest.fixture(scope="module")
def built(zoo_tokenizer: object) -> RoutingMemory:
    return build_memory(family("olmoe"), zoo_tokenizer, TEXTS, CONFIG)


@pytest.fixture
def folder(built: RoutingMemory, tmp_path: Path) -> Path:
    built.save_pretrained(tmp_path / "memory")
    return tmp_path / "memory"


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache as it lies on disk, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def assert_same(one: RoutingMemory, other: RoutingMemory) -> None:
    assert one.manifest == other.manifest
    assert list(one.layers) == list(other.layers)
    for index, layer in one.layers.items():
        assert torch.equal(layer.keys, other.layers[index].keys)
        assert torch.equal(layer.values, other.layers[index].values)
        assert layer.gamma == other.layers[index].gamma
    for mine, theirs in zip(vars(one.provenance), vars(other.provenance), strict=True):
        assert torch.equal(getattr(one.provenance, mine), getattr(other.provenance, theirs))


def test_saved_opened_and_attached_it_is_the_same(
    built: RoutingMemory, folder: Path, zoo_tokenizer: object
) -> None:
    opened = RoutingMemory.from_pretrained(folder)
    assert_same(opened, built)
    model = family("olmoe")
    ids = encode(zoo_tokenizer, make_texts(1, seed=3)[0])
    with attach(model, built):
        expected = model(ids, use_cache=False).logits
    with attach(model, opened):
        assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_it_is_plain_safetensors_and_json(built: RoutingMemory, folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "memory_config.json",
        "tokens.safetensors",
        "layer-000.safetensors",
        "layer-001.safetensors",
        "README.md",
    }
    tensors = load_file(folder / "layer-001.safetensors")
    assert torch.equal(tensors["keys"], built.layers[1].keys)
    config = json.loads((folder / "memory_config.json").read_text())
    assert config["base_model"]["architecture"] == "OlmoeForCausalLM"
    assert config["build"]["steps"] == 2
    assert config["keys"] == len(built)


def test_every_key_knows_where_it_came_from(built: RoutingMemory) -> None:
    words = [text.split() for text in TEXTS]
    places = zip(
        built.provenance.example.tolist(),
        built.provenance.position.tolist(),
        built.provenance.token.tolist(),
        strict=True,
    )
    assert [(example, place) for example, place, _ in places] == [
        (example, place) for example, row in enumerate(words) for place in range(len(row))
    ]
    assert built.provenance.token.tolist() == [int(word) for row in words for word in row]


def test_opening_reads_no_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = RoutingMemory.from_pretrained(folder, verify=False)
    size = (folder / "layer-000.safetensors").stat().st_size
    mapped = Path("/proc/self/maps").read_text(encoding="utf8")
    assert str(folder / "layer-000.safetensors") in mapped
    assert opened.layers[0].keys.nbytes < size


def test_saving_over_something_is_refused(
    built: RoutingMemory, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(MemoryFormatError, match="exists already"):
        built.save_pretrained(folder)
    built.save_pretrained(folder, overwrite=True)
    assert_same(RoutingMemory.from_pretrained(folder), built)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(MemoryFormatError, match="will not be overwritten"):
        built.save_pretrained(tmp_path / "thesis", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory", "thesis"]


def test_nothing_of_the_users_is_deleted(
    built: RoutingMemory, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    built.save_pretrained(link, overwrite=True)
    assert link.readlink() == folder
    assert_same(RoutingMemory.from_pretrained(folder), built)
    monkeypatch.chdir(folder)
    with pytest.raises(MemoryFormatError, match="is the current folder"):
        built.save_pretrained(".", overwrite=True)
    monkeypatch.chdir(tmp_path)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(MemoryFormatError, match=r"holds 'notes\.txt' beside a memory"):
        built.save_pretrained(folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert_same(RoutingMemory.from_pretrained(folder), built)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "memory"]


def test_everything_is_on_disk_before_it_has_its_name(
    built: RoutingMemory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def name(new: Path, target: Path) -> None:
        events.append("named")
        put_in_place(new, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr("knn_moe.memory.files.put_in_place", name)
    built.save_pretrained(folder, overwrite=True)
    before = events[: events.index("named")]
    assert {path.name for path in folder.iterdir()} <= set(before)
    assert before[-1].startswith(".memory.")  # the names in the new folder
    assert events[-1] == folder.parent.name  # and its own name


@pytest.mark.slow
def test_readers_see_the_old_or_the_new_memory(
    built: RoutingMemory, folder: Path, zoo_tokenizer: object
) -> None:
    other = build_memory(family("olmoe"), zoo_tokenizer, make_texts(3, seed=4))
    process = os.fork()
    while not process:
        other.save_pretrained(folder, overwrite=True)
        built.save_pretrained(folder, overwrite=True)
    try:
        for _ in range(100):
            opened = RoutingMemory.from_pretrained(folder)
            assert len(opened.layers[1].keys) == len(opened)
            expected = built if len(opened) == len(built) else other
            assert torch.equal(opened.layers[1].values, expected.layers[1].values)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_merging_in_place_again_is_refused(
    built: RoutingMemory, folder: Path, zoo_tokenizer: object
) -> None:
    other = build_memory(family("olmoe"), zoo_tokenizer, make_texts(3, seed=4), CONFIG)
    opened = RoutingMemory.from_pretrained(folder)
    whole = opened.merge(other, folder=folder, overwrite=True)
    assert len(whole) == len(built) + len(other)
    with pytest.raises(MemoryMismatchError, match="nothing to merge"):
        whole.merge(other, folder=folder, overwrite=True)


def test_a_failed_save_leaves_nothing(
    built: RoutingMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("knn_moe.memory.files.os.pwrite", full)
    with pytest.raises(OSError, match="No space"):
        built.save_pretrained(tmp_path / "memory")
    assert list(tmp_path.iterdir()) == []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of iterdir itself
            assert not str(link.readlink()).startswith(str(tmp_path))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def set_field(name: str, value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, name: value}))

    return change


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("layer-001.safetensors", truncate, "truncated"),
        ("layer-001.safetensors", flip, "edited"),
        ("layer-001.safetensors", Path.unlink, "missing"),
        ("tokens.safetensors", flip, "edited"),
        ("memory_config.json", truncate, "damaged"),
        ("memory_config.json", set_field("keys", 3), "edited"),
        ("memory_config.json", set_field("format_version", 99), "format 99.*Upgrade"),
        ("memory_config.json", Path.unlink, "is not a memory"),
    ],
)
def test_a_memory_that_is_not_whole_is_refused(
    folder: Path, name: str, change: Callable[[Path], None], reason: str
) -> None:
    change(folder / name)
    with pytest.raises(MemoryFormatError, match=reason) as error:
        RoutingMemory.from_pretrained(folder)
    assert name in str(error.value) or "is not a memory" in str(error.value)


def test_a_hub_id_opens_the_hubs_copy(
    built: RoutingMemory, tmp_path: Path, offline_hub: Path
) -> None:
    repository = offline_hub / "models--me--memory"
    built.save_pretrained(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    assert_same(RoutingMemory.from_pretrained("me/memory"), built)


def test_neither_a_folder_nor_on_the_hub(offline_hub: Path) -> None:
    with pytest.raises(MemoryFormatError, match="No memory at 'nobody/nothing'"):
        RoutingMemory.from_pretrained("nobody/nothing")


def test_merging(built: RoutingMemory, zoo_tokenizer: object, tmp_path: Path) -> None:
    model = family("olmoe")
    more = make_texts(5, seed=1)
    other = build_memory(model, zoo_tokenizer, more, CONFIG)
    merged = built.merge(other, folder=tmp_path / "merged")
    together = build_memory(model, zoo_tokenizer, TEXTS + more, CONFIG)
    assert len(merged) == len(built) + len(other)
    assert torch.equal(merged.provenance.example, together.provenance.example)
    for index, layer in merged.layers.items():
        torch.testing.assert_close(layer.keys, together.layers[index].keys)
        torch.testing.assert_close(layer.values, together.layers[index].values)
        assert layer.gamma == pytest.approx(together.layers[index].gamma, rel=1e-4)
    assert_same(RoutingMemory.from_pretrained(tmp_path / "merged"), merged)
    assert len(built.merge()) == len(built)


def test_merging_strangers_is_refused(built: RoutingMemory, zoo_tokenizer: object) -> None:
    stranger = build_memory(family("gpt_oss"), zoo_tokenizer, TEXTS)
    with pytest.raises(MemoryMismatchError, match=r"OlmoeForCausalLM.*GptOssForCausalLM"):
        built.merge(stranger)
    build = replace(built.build, loss="completion")
    other = replace(built, manifest=replace(built.manifest, build=build))
    with pytest.raises(
        MemoryMismatchError, match="lowers the loss of all tokens and the other comp"
    ):
        built.merge(other)


def test_a_temporary_folder_lives_as_long_as_its_memory(zoo_tokenizer: object) -> None:
    memory = build_memory(family("olmoe"), zoo_tokenizer, TEXTS[:2])
    place = memory.folder
    assert place is not None
    assert place.is_dir()
    del memory
    assert not place.exists()


def test_publishing_uploads_the_folder_with_its_card(
    built: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    seen: dict[str, object] = {}

    def upload(self: object, *, repo_id: str, folder_path: Path) -> str:
        seen["files"] = {path.name for path in Path(folder_path).iterdir()}
        seen["card"] = (Path(folder_path) / "README.md").read_text()
        return f"https://hub/{repo_id}"

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda self, repo, **_: repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    assert built.push_to_hub("me/memory") == "https://hub/me/memory"
    assert {"memory_config.json", "README.md", "layer-000.safetensors"} <= seen["files"]
    assert 'attach(model, "me/memory")' in seen["card"]
    assert "base_model:" not in seen["card"]  # the name of a class is nothing the hub knows
    in_ram = RoutingMemory(
        layers=built.layers, provenance=built.provenance, manifest=built.manifest
    )
    assert in_ram.push_to_hub("me/memory") == "https://hub/me/memory"


def test_an_empty_memory_changes_nothing(built: RoutingMemory, zoo_tokenizer: object) -> None:
    model = family("olmoe")
    ids = encode(zoo_tokenizer, TEXTS[0])
    base = model(ids, use_cache=False).logits
    nothing = Provenance(
        built.provenance.stream,
        built.provenance.begin,
        built.provenance.example_of_window,
        built.provenance.offset_of_window,
        built.provenance.key[:0],
    )
    layers = {
        index: type(layer)(layer.keys[:0], layer.values[:0], layer.gamma)
        for index, layer in built.layers.items()
    }
    empty = RoutingMemory(layers=layers, provenance=nothing, manifest=built.manifest)
    with attach(model, empty):
        assert torch.equal(model(ids, use_cache=False).logits, base)
