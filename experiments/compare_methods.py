"""How much does every method gain on every task, and how long does it take to prepare?

    python experiments/compare_methods.py tiny-olmoe tiny-qwen3 OUT/olmoe-80m \\
        --runs RUNS --out docs/measurements/calibrated

Runs one `knn-moe eval` of all methods for each model and task, several side by side on one device,
and compares their samples. Writes OUT/MODEL-TASK.json: changes against zero-shot with their
intervals, and the seconds of preparation. Evaluations that are not done after --seconds are
stopped, and the methods that were done by then are compared. Rows of methods that are not run
again stay in the file if they belong to the same model and text. `publish.py` makes tables of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from common import Arguments, Row, add_device, device_name, make_parser, write_json
from knn_moe.errors import KnnMoeError
from knn_moe.evaluation.compare import compare_runs
from knn_moe.evaluation.store import read_runs

METHODS: Final = (
    "zero-shot",
    "knn-paper",
    "knn-calibrated",
    "knn-calibrated+head",
    "sft-router",
    "knn-lm",
    "knn-calibrated+knn-lm",
    "sft",
)
TASKS: Final = ("text_medical", "text_sql", "medmcqa")
_SAME_LOSS: Final = 1e-5  # nats per token: the same sums in another order
_KNN_MOE: Final = (sys.executable, "-c", "from knn_moe.cli.main import main; main()")


@dataclass(frozen=True)
class MethodEvaluation:
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

    def start(self, options: argparse.Namespace) -> subprocess.Popen[bytes]:
        """Start `knn-moe eval`; its output goes to log.txt."""
        methods = [part for method in options.methods for part in ("-m", method)]
        scoring = "text" if self.task.startswith("text_") else "likelihood"
        limit = options.windows if scoring == "text" else options.questions
        command = [*_KNN_MOE, "eval", self.model, "-t", self.task, *methods, "-o", self.folder]
        command += ["--scoring", scoring, "--limit", limit, "--batch-size", options.batch_size]
        command += ["--dtype", "float32", "--device", options.device, "--resume"]
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "2"}
        with (self.folder / "log.txt").open("wb") as log:
            return subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, env=environment
            )

    def compare(self) -> list[Row]:
        """Compare the methods that are done with zero-shot; if that fails, print why."""
        try:
            lines = compare_runs(read_runs(self.folder), "zero-shot")
        except KnnMoeError as error:
            log = (self.folder / "log.txt").read_text(encoding="utf8")
            print(f"{self.name}: {error} {log[-500:]}", flush=True)
            return []
        rows = [line.to_dict() for line in lines if line.task == self.task]
        return [{"model": Path(self.model).name, **row} for row in rows]


def main(arguments: Arguments = None) -> None:
    """Evaluate every model on every task and write what was compared."""
    options = parse_options(arguments)
    pairs = product(options.models, options.tasks)
    waiting = [MethodEvaluation(model, task, options.runs) for model, task in pairs]
    for evaluation in run_side_by_side(waiting, options):
        rows = evaluation.compare()
        for row in rows:
            row.update(device=device_name(options.device), at_once=options.at_once)
            print(format_row(row), flush=True)
        if rows:
            path = options.out / f"{evaluation.name}.json"
            before = json.loads(path.read_text(encoding="utf8")) if path.is_file() else []
            write_json(path, [*rows, *choose_earlier_rows(before, rows)])


def parse_options(arguments: Arguments) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="+", help="embedded model names or model folders")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="tasks, as in `knn-moe eval`")
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, help="methods, as in `knn-moe eval`"
    )
    parser.add_argument("--windows", type=int, default=200, help="test windows of a text task")
    parser.add_argument("--questions", type=int, default=400, help="test questions of other tasks")
    parser.add_argument("--batch-size", type=int, default=64, help="as in `knn-moe eval`")
    parser.add_argument("--at-once", type=int, default=4, help="evaluations side by side")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop evaluations after so long"
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder for samples and memories")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    add_device(parser)
    return parser.parse_args(arguments)


def run_side_by_side(
    waiting: list[MethodEvaluation], options: argparse.Namespace
) -> Iterator[MethodEvaluation]:
    """Run `options.at_once` evaluations at a time and yield each when it has ended."""
    deadline = time.monotonic() + options.seconds
    running: dict[MethodEvaluation, subprocess.Popen[bytes]] = {}
    while waiting or running:
        late = time.monotonic() > deadline
        while waiting and len(running) < options.at_once and not late:
            evaluation = waiting.pop(0)
            running[evaluation] = evaluation.start(options)
        for evaluation, process in list(running.items()):
            if late:
                process.kill()
                process.wait()
            if process.poll() is not None:
                del running[evaluation]
                yield evaluation
        if late:
            return
        time.sleep(0.2)


def choose_earlier_rows(before: list[Row], now: list[Row]) -> list[Row]:
    """Return the earlier rows of methods that were not run again.

    They stay only if the zero-shot loss is the same: then model and text are the same, too.
    """
    base = [row["nll"] for rows in (before, now) for row in rows if row["method"] == "zero-shot"]
    if len(base) < 2 or abs(base[0] - base[1]) > _SAME_LOSS:
        return []
    again = {row["method"] for row in now}
    return [row for row in before if row["method"] not in again]


def format_row(row: Row) -> str:
    """Format model, task, method, change of the loss with its interval, and seconds."""
    kind = "answer_change" if row["scoring"] == "likelihood" else "nll_change"
    change = row[kind] or {"difference": 0.0, "low": 0.0, "high": 0.0}
    interval = "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**change)
    seconds = row["preparation_seconds"] or 0.0
    return f"{row['model']:13} {row['task']:13} {row['method']:22} {interval:26} {seconds:6.1f} s"


if __name__ == "__main__":
    main()
