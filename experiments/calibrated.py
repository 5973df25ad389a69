"""What a calibrated memory is worth beside everything else: the table of docs/results.md.

    python models/calibrated.py tiny-olmoe tiny-qwen3 OUT/olmoe-80m --runs RUNS \
        --out docs/measurements/calibrated

For each model and task one `knn-moe eval` of all methods, several side by side on one device, then
`knn-moe compare` of what they wrote: OUT/MODEL-TASK.json, with changes against the model alone,
their intervals and the seconds each method took to prepare. What is not done after --seconds is
ended, and the methods that were done until then are compared. Rows of methods that are not run
again stay, if they are of the same model and text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from audit import device_name

METHODS = (
    "zero-shot",
    "knn-paper",
    "knn",
    "knn-calibrated",
    "knn-calibrated+head",
    "sft-router",
    "knn-lm",
    "knn-calibrated+knn-lm",
    "sft",
)
TASKS = ("text_medical", "text_sql", "medmcqa")
SAME = 1e-5  # nats a token: the same sums in another order
KNN_MOE = (sys.executable, "-c", "from knn_moe.cli.main import main; main()")


@dataclass(frozen=True)
class Evaluation:
    """All methods on one model and task, in a process of its own."""

    model: str
    task: str
    runs: Path

    @property
    def name(self) -> str:
        return f"{Path(self.model).name}-{self.task}"

    @property
    def folder(self) -> Path:
        return self.runs / self.name

    def start(self, asked: argparse.Namespace) -> subprocess.Popen[bytes]:
        methods = [part for method in asked.methods for part in ("-m", method)]
        scoring = "text" if self.task.startswith("text_") else "likelihood"
        limit = asked.windows if scoring == "text" else asked.questions
        command = [*KNN_MOE, "eval", self.model, "-t", self.task, *methods, "-o", self.folder]
        command += ["--scoring", scoring, "--limit", limit, "--batch-size", asked.batch_size]
        command += ["--dtype", "float32", "--device", asked.device, "--resume"]
        self.folder.mkdir(parents=True, exist_ok=True)
        threads = {**os.environ, "OMP_NUM_THREADS": "2"}
        with (self.folder / "log.txt").open("wb") as log:
            return subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=threads)

    def rows(self) -> list[dict[str, Any]]:
        """What `knn-moe compare` says of the methods that are done; prints why, if there are
        none."""
        command = [*KNN_MOE, "compare", self.folder, "--json"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode:
            log = (self.folder / "log.txt").read_text(encoding="utf8")
            print(f"{self.name}: {done.stderr.strip()} {log[-500:]}", flush=True)
            return []
        lines = json.loads(done.stdout)
        return [
            {"model": Path(self.model).name, **row} for row in lines if row["task"] == self.task
        ]


def main() -> None:
    asked = arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    waiting = [Evaluation(*pair, asked.runs) for pair in product(asked.models, asked.tasks)]
    for evaluation in ended(waiting, asked):
        rows = evaluation.rows()
        if not rows:
            continue
        path = asked.out / f"{evaluation.name}.json"
        before = json.loads(path.read_text(encoding="utf8")) if path.is_file() else []
        where = {"device": device_name(asked.device), "at_once": asked.at_once}
        for row in rows:
            row.update(where)
            print(line_of(row), flush=True)
        text = json.dumps([*rows, *still_true(before, rows)], indent=1)
        path.write_text(f"{text}\n", encoding="utf8")


def still_true(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of methods that were not run again. Where the model alone loses as much as it did, it is
    the same model, and so is the text."""
    alone = [row["nll"] for rows in (before, now) for row in rows if row["method"] == "zero-shot"]
    if len(alone) < 2 or abs(alone[0] - alone[1]) > SAME:
        return []
    again = {row["method"] for row in now}
    return [row for row in before if row["method"] not in again]


def ended(waiting: list[Evaluation], asked: argparse.Namespace) -> Iterable[Evaluation]:
    """Each evaluation when it is over, some running side by side."""
    until = time.monotonic() + asked.seconds
    running: dict[Evaluation, subprocess.Popen[bytes]] = {}
    while waiting or running:
        late = time.monotonic() > until
        while waiting and len(running) < asked.at_once and not late:
            evaluation = waiting.pop(0)
            running[evaluation] = evaluation.start(asked)
        for evaluation, process in list(running.items()):
            if late:
                process.kill()
                process.wait()
            if process.poll() is not None:
                del running[evaluation]
                yield evaluation
        if late:
            return
        time.sleep(0.5)


def line_of(row: dict[str, Any]) -> str:
    """Model, task, method, change of the loss and its interval, seconds of preparation."""
    kind = "answer_change" if row["scoring"] == "likelihood" else "nll_change"
    change = row[kind] or {"difference": 0.0, "low": 0.0, "high": 0.0}
    told = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**change)
    seconds = row["preparation_seconds"] or 0.0
    return f"{row['model']:13} {row['task']:13} {row['method']:22} {told:26} {seconds:6.1f} s"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="an embedded model's name, or a folder")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--windows", type=int, default=200, help="of text to measure on")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=4, help="evaluations side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--runs", type=Path, required=True, help="folder for samples and memories")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
