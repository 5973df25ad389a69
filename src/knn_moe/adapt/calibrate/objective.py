"""What calibration lowers: the loss of the next tokens, or, of questions with distractors, of the
choice.

The loss of a choice is -log of the right answer's share among all choices, by their log-likelihoods
per character, which is how they are compared in use. Making right answers likelier is not enough:
wrong ones may become likelier as well. Log-likelihoods are divided by a temperature, at which the
model alone is likeliest to be right: a model that is sure of wrong answers would have a large loss,
in which no gain could be seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

from knn_moe.build.optimise import batch_losses
from knn_moe.equations.losses import choice_losses
from knn_moe.reference.choices import ChoiceBatch
from knn_moe.reference.windows import Batch
from knn_moe.routers.model_state import input_device

_TEMPERATURES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def line_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Run the model on a batch and return the loss of each line, to be divided by what lines count.

    Shape [B] fp32, on the logits' device.
    """
    batch = batch.to(input_device(model))
    losses = batch_losses(model, batch).sum(dim=1)
    if not isinstance(batch, ChoiceBatch):
        return losses
    lines = batch.lines.to(losses.device)
    chosen = choice_losses(-losses * batch.weight.to(losses.device), lines)
    return torch.zeros_like(losses).index_add(0, lines[:, 0], chosen)


@torch.no_grad()
def find_temperature(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the temperature at which the loss of choices of the model as it is is lowest."""
    totals = torch.zeros(len(_TEMPERATURES), dtype=torch.float64)
    for batch in batches:
        assert isinstance(batch, ChoiceBatch)
        losses = batch_losses(model, batch.to(input_device(model))).sum(dim=1).cpu()
        for place, temperature in enumerate(_TEMPERATURES):
            scores = -losses * batch.weight / temperature
            totals[place] += choice_losses(scores, batch.lines).double().sum()
    return _TEMPERATURES[int(totals.nan_to_num(torch.inf).argmin())]
