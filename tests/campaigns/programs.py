"""Generated programs that do harm, never end, or are right: what each does to the machine.

Each runs in every confinement that works here. Its verdict must be the right one; nothing outside
may change; the evaluator must live; and no process may be left. Endless programs also run while
their evaluator is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.tally import Tally
from helpers.programs import TESTS, Case, all_cases
from knn_moe.tasks import confinement
from knn_moe.tasks.sandbox import Limits, Outcome, allow_programs, run_program

_KILLED = "killed evaluator"
_PATIENCE = 60.0  # seconds until something counts as not happening


def run(count: int, seed: int, scratch: Path) -> Tally:
    """Run `count` programs; all of them in all confinements, then again."""
    confinement.find_confinement()  # says why if there is none
    cases = all_cases()
    faults = [(kind, name) for kind in working_confinements() for name in cases]
    endless = [name for name, case in cases.items() if case.endless]
    faults += [(f"{kind}, {_KILLED}", name) for kind in working_confinements() for name in endless]
    random.Random(seed).shuffle(faults)
    tally = Tally("programs")
    with Machine(scratch) as machine:
        for number in range(count):
            label, name = faults[number % len(faults)]
            kind, _, killed = label.partition(", ")
            found = (machine.kill if killed else machine.judge)(kind, cases[name])
            label = label if killed else f"{kind}, {name.partition(':')[0]}"
            if found is None:
                tally.passed(label)
            else:
                tally.failed(label, f"{name}: {found}")
    return tally


def working_confinements() -> list[str]:
    """Return the names of the confinements that can be used here."""
    return [each.name for each in confinement.CONFINEMENTS if confinement.try_out(each) is None]


def run_in(kind: str, program: str, limits: Limits) -> Outcome:
    """Run a program in the confinement `kind`, in the process of the evaluator."""
    chosen = next(each for each in confinement.CONFINEMENTS if each.name == kind)
    confinement.find_confinement = lambda: chosen  # type: ignore[assignment]
    with allow_programs():
        return run_program(program, TESTS, limits)


@dataclass
class Machine:
    """What is outside: an evaluator, a file that anybody may write to, and a server."""

    scratch: Path
    server: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    memory_mb: int = field(default_factory=lambda: 256 + os.getpid() % 512)
    _pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Machine:
        self.server.setblocking(False)
        self.scratch.chmod(0o777)
        (self.scratch / "victim.txt").write_text("precious")
        (self.scratch / "victim.txt").chmod(0o666)
        return self

    def __exit__(self, *error: object) -> None:
        self._end_evaluator()
        self.server.close()

    def judge(self, kind: str, case: Case) -> str | None:
        """Run a program, and return what went wrong, or None."""
        limits = Limits(seconds=0.5 if case.endless else 60, memory_mb=self.memory_mb)
        try:
            outcome = self._start(kind, case.program, limits).result(timeout=3 * _PATIENCE)
        except BrokenProcessPool:
            self._end_evaluator()
            return "the evaluator was killed"
        except Exception as error:  # whatever it is, the evaluation would have ended
            self._end_evaluator()
            return f"the evaluation ended with {type(error).__name__}: {error}"
        if case.passes is not None and outcome.passed != case.passes:
            return f"the verdict is {outcome}"
        return self._find_damage()

    def kill(self, kind: str, case: Case) -> str | None:
        """Kill an evaluator while its program runs, and return what went wrong, or None."""
        limits = Limits(seconds=600, memory_mb=self.memory_mb)
        verdict = self._start(kind, case.program, limits)
        if not _wait_until(lambda: verdict.done() or bool(self._left_running())):
            return "the program did not start"
        self._end_evaluator()
        return self._find_damage()

    def _start(self, kind: str, program: str, limits: Limits) -> Future[Outcome]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        known = {
            "FOLDER": str(self.scratch),
            "PORT": self.server.getsockname()[1],
            "EVALUATOR": self._pool.submit(os.getpid).result(),
        }
        lines = "".join(f"{name} = {value!r}; " for name, value in known.items())
        future = "from __future__ import annotations\n"  # must stay first
        if program.startswith(future):
            program, lines = program.removeprefix(future), future + lines
        return self._pool.submit(run_in, kind, f"{lines}\n{program}", limits)

    def _end_evaluator(self) -> None:
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
                process.join()
            self._pool.shutdown()
            self._pool = None

    def _left_running(self) -> list[int]:
        """Return the processes with our programs' limit, which they cannot raise."""
        limit = f"Max address space {self.memory_mb << 20} "
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and limit in " ".join(_read(entry / "limits").split()):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended
        return found

    def _find_damage(self) -> str | None:
        """Return what is not as it was; a killed tree takes a moment to end."""
        if not _wait_until(lambda: not self._left_running()):
            left = self._left_running()
            for process in left:
                os.kill(process, signal.SIGKILL)
            return f"{len(left)} processes are left"
        try:
            self.server.accept()
        except BlockingIOError:
            pass
        else:
            return "the server was reached"
        victim = self.scratch / "victim.txt"
        if [path.name for path in self.scratch.iterdir()] != [victim.name]:
            return f"the folder outside has {[path.name for path in self.scratch.iterdir()]}"
        if victim.read_text() != "precious" or victim.stat().st_mode & 0o777 != 0o666:
            return "the file outside was changed"
        return None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf8", errors="replace")


def _wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
