"""Pick passages of the test text to be shown token by token.

Knows how a memory is attached and explained; nothing of how a passage is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from knn_moe.evaluation.store import Run
from knn_moe.inference.attach import attach
from knn_moe.memory.memory import RoutingMemory
from knn_moe.report.passages import Passage
from knn_moe.tasks.questions import Question


def pick_passages(
    model: Any,
    tokenizer: Any,
    memory: RoutingMemory,
    windows: Sequence[Question],
    runs: tuple[Run, Run],
) -> tuple[Passage, ...]:
    """Explain the windows that the memory helped most, as much as the median, and least.

    Args:
        windows: All test windows.
        runs: The model's runs on them, without and with the memory.
    """
    before, after = ({sample.id: sample.nll or 0.0 for sample in run.samples} for run in runs)
    order = sorted(windows, key=lambda window: after[window.id] - before[window.id])
    chosen = {
        "The passage that gained most": order[0],
        "The median passage": order[len(order) // 2],
        "The passage that gained least": order[-1],
    }
    ids = torch.tensor([window.ids for window in chosen.values()])
    with attach(model, memory) as routing:
        explained = routing.explain(ids, tokenizer=tokenizer).sequences
    return tuple(Passage(title, tokens) for title, tokens in zip(chosen, explained, strict=True))
