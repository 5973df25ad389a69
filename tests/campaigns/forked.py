"""Run trials in forked child processes: a crash is one more outcome, not the end of a campaign."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Final

from campaigns.tally import Tally

_LONGEST: Final = 300  # seconds of a process; one that hangs is killed, which counts as a crash

# Does what its argument, a trial's number, says. Returns its kind, and what went wrong or None.
Trial = Callable[[int], tuple[str, str | None]]


def run_forked(tally: Tally, trial: Trial, numbers: Sequence[int], at_once: int = 25) -> None:
    """Run `trial` on each of `numbers`, `at_once` in a process, and enter the outcomes.

    A failure ends its process, since it may have left something that makes the next trials fail.
    """
    left = list(numbers)
    while left:
        outcomes, status = _fork(trial, left[:at_once])
        if status:
            number = left[min(len(outcomes), len(left) - 1)]
            outcomes.append(("crash", f"trial {number} ended its process with status {status}"))
        for kind, failure in outcomes:
            if failure is None:
                tally.passed(kind)
            else:
                tally.failed(kind, failure)
        left = left[len(outcomes) :]


def _fork(trial: Trial, numbers: Sequence[int]) -> tuple[list[tuple[str, str | None]], int]:
    sys.stdout.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of ours hold no lock
        child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as out:
                for number in numbers:
                    outcome = trial(number)
                    out.write(json.dumps(outcome) + "\n")
                    out.flush()
                    if outcome[1] is not None:
                        break
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    overdue = threading.Timer(_LONGEST, os.kill, (child, signal.SIGKILL))
    overdue.start()
    with os.fdopen(reading) as lines:
        outcomes = [tuple(json.loads(line)) for line in lines]
    overdue.cancel()
    return outcomes, os.waitpid(child, 0)[1]  # type: ignore[return-value]
