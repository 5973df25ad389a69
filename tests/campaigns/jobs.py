"""Jobs that write memories and runs, each in a process of its own that can be ended anywhere.

A job works in a folder that holds its inputs. `prepare` puts them there, `start` is the command as
a user gives it, and `again` is the command that a user gives after it was interrupted.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from transformers.utils.logging import disable_progress_bar

from helpers.calibrating import QUICK, sayings
from helpers.commands import save_model
from helpers.zoo import family, make_texts
from knn_moe import BuildConfig, RoutingMemory, build_memory
from knn_moe.adapt.calibrate.build_calibrated import build_calibrated
from knn_moe.adapt.calibrate.calibrate import calibrate
from knn_moe.adapt.calibrate.result import write_calibrated
from knn_moe.bench.models import number_tokenizer
from knn_moe.cli.main import main
from knn_moe.errors import KnnMoeError

_TIMES: Final = re.compile(r"seconds|digest|versions|libraries")


@dataclass(frozen=True)
class Job:
    """A job, what it starts from, and the name of what it writes."""

    name: str
    prepare: Callable[[Path], None]
    start: Callable[[Path], None]
    again: Callable[[Path], None]
    output: str = "memory"


class Inputs:
    """What the jobs start from, made once: a model, reference sets and two memories."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        # A process that is killed inside a bar of tqdm keeps the lock that all of them share.
        disable_progress_bar()
        self.model = save_model("olmoe", folder / "model")
        self.network, self.tokenizer = family("olmoe"), number_tokenizer(128)
        for name, texts in (("ref", make_texts(30)), ("more", make_texts(20, seed=7))):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / f"{name}.jsonl").write_text(lines)
        self.reference, self.more = folder / "ref.jsonl", folder / "more.jsonl"
        self.first, self.second = folder / "first", folder / "second"
        small = BuildConfig(batch_tokens=40)
        build_memory(self.network, self.tokenizer, self.reference, small, folder=self.first)
        build_memory(self.network, self.tokenizer, self.more, small, folder=self.second)
        self.sayings = sayings(40)
        quiz = [
            {"id": str(n), "question": f"{n} {n + 1}", "choices": ["3 4", "5"], "answer": n % 2}
            for n in range(20, 60)
        ]
        self.quiz = folder / "quiz.jsonl"
        self.quiz.write_text("".join(json.dumps(row) + "\n" for row in quiz))
        for name, rows in (("test", quiz[:20]), ("ref", quiz[20:])):
            with gzip.open(folder / f"arc_easy_{name}.jsonl.gz", "wt") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
        self.data = folder


def make_jobs(inputs: Inputs) -> list[Job]:
    """Return every kind of job that writes something large."""
    model, ref, more = str(inputs.model), str(inputs.reference), str(inputs.more)

    def nothing(folder: Path) -> None:
        pass

    def memory(folder: Path) -> None:
        shutil.copytree(inputs.first, folder / "memory")

    def command(*words: str) -> Callable[[Path], None]:
        return lambda folder: run_command(*(word.replace("@", str(folder)) for word in words))

    build = ("build", model, ref, "-o", "@/memory", "--batch-tokens", "40")
    replaced = (*build, "--steps", "2", "--overwrite")
    appended = ("build", model, more, "--append", "@/memory", "-o", "@/memory", "--overwrite")
    evaluated = ("eval", model, "-t", str(inputs.quiz), "-m", "zero-shot", "-o", "@/runs",
                 "--scoring", "likelihood", "--batch-size", "4",
                 "--memory", str(inputs.first), "-m", "knn")  # fmt: skip

    prepared = ("eval", model, "-t", "arc_easy", "-m", "knn-paper", "-o", "@/runs",
                "--data", str(inputs.data), "--batch-size", "2")  # fmt: skip

    def save(folder: Path) -> None:
        opened = RoutingMemory.from_pretrained(inputs.second)
        opened.save_pretrained(folder / "memory", overwrite=True)

    def calibrated(folder: Path, *, overwrite: bool = False) -> None:
        build_calibrated(
            inputs.network,
            inputs.tokenizer,
            inputs.sayings,
            BuildConfig(batch_tokens=64),
            QUICK,
            folder=folder / "memory",
            overwrite=overwrite,
        )

    calibrated_over = partial(calibrated, overwrite=True)

    def uncalibrated(folder: Path) -> None:
        build = (inputs.network, inputs.tokenizer, inputs.sayings, BuildConfig())
        build_memory(*build, folder=folder / "memory")

    def calibrate_it(folder: Path) -> None:
        memory = RoutingMemory.from_pretrained(folder / "memory")
        found = calibrate(inputs.network, memory, config=QUICK)
        write_calibrated(found.apply(memory), folder / "memory")

    def repeated(name: str, *words: str, start: Callable[[Path], None] = memory) -> Job:
        return Job(name, start, command(*words), command(*words))

    in_place = ("-o", "@/memory", "--overwrite")
    return [
        Job("build", nothing, command(*build), command(*build, "--resume")),
        Job("build --overwrite", memory, command(*replaced), command(*replaced, "--resume")),
        repeated("build --overwrite, repeated", *replaced),
        Job("build --append in place", memory, command(*appended), command(*appended, "--resume")),
        repeated("build --append in place, repeated", *appended),
        Job("build_calibrated", nothing, calibrated, calibrated),
        Job("build_calibrated(overwrite)", memory, calibrated_over, calibrated_over),
        Job("calibrate", uncalibrated, calibrate_it, calibrate_it),
        Job("save_pretrained(overwrite)", memory, save, save),
        repeated("merge in place", "merge", "@/memory", str(inputs.second), *in_place),
        repeated("drop in place", "drop", "@/memory", "--example", "3", *in_place),
        repeated("prune", "prune", str(inputs.first), "--keep", "0.5", "--by", "chance", *in_place),
        repeated("compress in place", "compress", "@/memory", *in_place),
        Job("eval", nothing, command(*evaluated), command(*evaluated, "--resume"), "runs"),
        Job("eval --overwrite", nothing, command(*evaluated, "--overwrite"),
            command(*evaluated, "--resume"), "runs"),
        Job("eval that builds", nothing, command(*prepared), command(*prepared, "--resume"),
            "runs"),
    ]  # fmt: skip


def run_command(*words: str) -> None:
    """Run `knn-moe` in this process, and exit with its code."""
    main(list(words), standalone_mode=True)


def run_apart(action: Callable[[], None], log: Path) -> int:
    """Run `action` in a forked process and return its process id. Its output goes to `log`."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        action()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except KnnMoeError as error:
        os.write(2, str(error).encode())
        code = 2
    except BaseException as error:  # the parent reads it in the log
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(code)


def digest_folder(folder: Path) -> dict[str, str]:
    """Return a digest of every file below `folder`, apart from times and versions."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "README.md" and not _TIMES.search(path.name):
            data = path.read_bytes()
            if path.suffix in (".json", ".jsonl"):
                with suppress(ValueError):  # damaged
                    data = _normalise(path, data)
            found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


def _normalise(path: Path, data: bytes) -> bytes:
    documents = data.splitlines() if path.suffix == ".jsonl" else [data]
    values = [json.loads(document) for document in documents]
    if path.name == "run.json":
        values[0].pop("routing", None)  # observed only if a run is not interrupted
    return json.dumps(_without_times(values), sort_keys=True).encode()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if not _TIMES.search(name)}
        return {name: _without_times(each) for name, each in kept.items()}
    return [_without_times(each) for each in value] if isinstance(value, list) else value
