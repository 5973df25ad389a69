"""How long work takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch

_SECONDS: Final = 1.0  # that work is repeated for
_ROUNDS: Final = (5, 200)  # fewest and most repetitions


def quickest(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of the quickest of many repetitions: in others the cores may be busy."""
    spent: list[float] = []
    fewest, most = _ROUNDS
    end = time.perf_counter() + _SECONDS
    while len(spent) < fewest or (time.perf_counter() < end and len(spent) < most):
        spent.append(time_once(work, device))
    return min(spent)


def time_once(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds from an idle device to an idle device."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
