"""The folder that a memory is made in: one process at a time, damage is found, and nothing of the
user's is deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from helpers.zoo import make_texts
from knn_moe import BuildConfig, RoutingMemory, build_memory
from knn_moe.build.append import append
from knn_moe.build.workspace import Workspace, discard, partial_folder
from knn_moe.errors import BuildError, MemoryFormatError, MemoryMismatchError
from knn_moe.support.progress import Progress

TEXTS = make_texts(14)
CONFIG = BuildConfig(batch_tokens=40)


def stop(progress: Progress) -> None:
    if progress.done > 100:
        raise KeyboardInterrupt


@pytest.fixture
def interrupted(zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, tmp_path: Path) -> Path:
    """The name of a memory whose build was interrupted."""
    target = tmp_path / "memory"
    with pytest.raises(KeyboardInterrupt):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, CONFIG, folder=target, on_progress=stop)
    return target


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:2000])


def zero_rows(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:300] + bytes(len(data) - 300))


def invent_batch(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    path.write_text(path.read_text() + first.replace("0 ", "4 ", 1) + "\n")


def end_in_nuls(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(64) + b"\n")


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("memory/layer-001.safetensors", cut, "rows that it names are not in it"),
        ("memory/layer-000.safetensors", zero_rows, "rows that it names are not in it"),
        ("memory/layer-000.safetensors", Path.unlink, "rows that it names are not in it"),
        ("memory/tokens.safetensors", zero_rows, None),  # it is written again
        ("journal.txt", invent_batch, "rows that it names are not in it"),
        ("journal.txt", end_in_nuls, "journal.txt' is damaged"),
        ("plan.json", zero_rows, "no readable plan. The job starts again"),
        ("plan.json", Path.unlink, "no readable plan. The job starts again"),
    ],
)
def test_a_damaged_workspace_is_found_and_its_batches_are_computed_again(
    name: str,
    damage: Callable[[Path], None],
    sentence: str | None,
    interrupted: Path,
    zoo_olmoe: PreTrainedModel,
    zoo_tokenizer: object,
    tmp_path: Path,
) -> None:
    damage(partial_folder(interrupted) / name)
    build = (zoo_olmoe, zoo_tokenizer, TEXTS, CONFIG)
    if sentence is None:
        build_memory(*build, folder=interrupted)
    else:
        with pytest.warns(UserWarning, match=sentence):
            build_memory(*build, folder=interrupted)
    build_memory(*build, folder=tmp_path / "whole")
    for path in (tmp_path / "whole").iterdir():
        assert (interrupted / path.name).read_bytes() == path.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory", "whole"]


def test_rows_are_on_disk_before_the_journal_names_them(
    zoo_olmoe: PreTrainedModel,
    zoo_tokenizer: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def note(name: str, function: Callable[[int], None]) -> Callable[[int], None]:
        def noted(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink().name
            order.append(f"{name} {path}")
            function(descriptor)

        return noted

    monkeypatch.setattr(os, "fsync", note("sync", os.fsync))
    monkeypatch.setattr(os, "fdatasync", note("sync", os.fdatasync))
    build_memory(zoo_olmoe, zoo_tokenizer, TEXTS[:2], BuildConfig(), folder=tmp_path / "memory")
    layers = ["sync layer-000.safetensors", "sync layer-001.safetensors"]
    place = order.index("sync journal.txt")
    assert order[place - 2 : place] == layers
    assert order.index("sync memory_config.json.new") > place
    assert order[-1] != "sync journal.txt"  # the parent's names come last
    order.clear()
    build_memory(zoo_olmoe, zoo_tokenizer, TEXTS[:2])
    assert "sync journal.txt" not in order  # what is temporary need not last


def test_two_builds_to_one_folder_are_refused(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, tmp_path: Path
) -> None:
    target, refusals = tmp_path / "memory", []

    def build_too(progress: Progress) -> None:
        if not refusals:
            with pytest.raises(BuildError, match="Another process is working in") as refused:
                build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, CONFIG, folder=target)
            refusals.append(refused)
            with pytest.raises(BuildError, match="Another process is working in"):
                discard(target)

    whole = build_memory(
        zoo_olmoe, zoo_tokenizer, TEXTS, CONFIG, folder=target, on_progress=build_too
    )
    assert refusals
    assert len(whole) == len(RoutingMemory.from_pretrained(target))


def test_a_folder_of_the_users_is_not_taken_for_a_workspace(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, tmp_path: Path
) -> None:
    mine = tmp_path / "memory.partial"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(BuildError, match=r"holds 'thesis\.tex', which is no part of a build"):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, folder=tmp_path / "memory")
    with pytest.raises(BuildError, match=r"thesis\.tex"):
        discard(tmp_path / "memory")
    assert (mine / "thesis.tex").read_text() == "years of work"


def test_a_folder_called_memory_in_it_is_the_users_unless_it_is_a_memory(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, tmp_path: Path
) -> None:
    precious = tmp_path / "memory.partial" / "memory" / "precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(BuildError, match=r"holds 'precious\.txt'"):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, folder=tmp_path / "memory")
    assert precious.read_text() == "mine"


def test_a_build_that_has_ended_leaves_the_next_one_alone(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, tmp_path: Path
) -> None:
    target = tmp_path / "memory"
    begun: list[Workspace] = []

    def begin_another(progress: Progress) -> None:
        if progress.stage == "sealing" and progress.done:
            begun.append(Workspace(target, {}, overwrite=True))
            (begun[0].root / "memory").mkdir()

    build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, CONFIG, folder=target, on_progress=begin_another)
    assert (begun[0].root / "memory").is_dir()
    begun[0].close()


def test_the_journal_is_left_alone_unless_it_is_damaged(
    interrupted: Path,
    zoo_olmoe: PreTrainedModel,
    zoo_tokenizer: object,
) -> None:
    journal = partial_folder(interrupted) / "journal.txt"
    before = journal.stat().st_ino, journal.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, CONFIG, folder=interrupted, on_progress=stop)
    assert journal.stat().st_ino == before[0]
    assert journal.read_bytes().startswith(before[1])


@pytest.mark.parametrize("locks", ["files alone", "nothing"])
def test_where_folders_cannot_be_locked_a_file_is(
    locks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> int:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("knn_moe.build.workspace.claim", refuse)
    if locks == "nothing":
        monkeypatch.setattr("knn_moe.build.workspace.claim_file", refuse)
        with pytest.warns(UserWarning, match="cannot be locked"):
            Workspace(tmp_path / "memory", {}).close()
        return
    with Workspace(tmp_path / "memory", {}), pytest.raises(BuildError, match="Another process"):
        Workspace(tmp_path / "memory", {})
    assert list(tmp_path.iterdir()) == []


def test_odd_names_are_refused_in_one_sentence(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    (tmp_path / "m.partial").write_text("a file")
    for name in ("/", str(loop), "a\0b", "a\udcff"):
        with pytest.raises(MemoryFormatError, match="No memory can be written to"):
            Workspace(Path(name), {})
    with pytest.raises(BuildError, match="is a file"):
        Workspace(tmp_path / "m", {})


def test_a_build_that_was_killed_just_after_it_had_ended_is_found_done(
    zoo_olmoe: PreTrainedModel,
    zoo_tokenizer: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(workspace: Workspace) -> None:
        raise KeyboardInterrupt

    target = tmp_path / "memory"
    build = (zoo_olmoe, zoo_tokenizer, TEXTS, CONFIG)
    with monkeypatch.context() as patched:
        patched.setattr(Workspace, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            build_memory(*build, folder=target)
    assert target.exists()
    assert partial_folder(target).exists()
    assert len(build_memory(*build, folder=target)) == len(build_memory(*build))
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]
    with pytest.raises(MemoryFormatError, match="exists already"):
        build_memory(*build, folder=target)


def test_appending_in_place_twice_changes_nothing(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, tmp_path: Path
) -> None:
    folder, more = tmp_path / "memory", tmp_path / "more.txt"
    more.write_text("3 4 5 6 7")
    memory = build_memory(zoo_olmoe, zoo_tokenizer, TEXTS, CONFIG, folder=folder)
    for _ in range(2):
        memory = append(
            memory, zoo_olmoe, zoo_tokenizer, more, CONFIG, folder=folder, overwrite=True
        )
        assert memory.provenance.num_examples == len(TEXTS) + 1
    copied = append(memory, zoo_olmoe, zoo_tokenizer, more, CONFIG, folder=tmp_path / "copy")
    assert copied.provenance.num_examples == len(TEXTS) + 2
    assert torch.equal(copied.layers[0].keys[: len(memory)], memory.layers[0].keys)


def test_appending_the_whole_memory_s_examples_is_refused(
    zoo_olmoe: PreTrainedModel, zoo_tokenizer: object, tmp_path: Path
) -> None:
    same = tmp_path / "same.txt"
    same.write_text("3 4 5 6 7")
    memory = build_memory(zoo_olmoe, zoo_tokenizer, same, CONFIG)
    with pytest.raises(MemoryMismatchError, match="holds exactly these examples"):
        append(memory, zoo_olmoe, zoo_tokenizer, same, CONFIG, folder=tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["same.txt"]
