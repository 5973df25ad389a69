"""The parts of a reference set, as a model reads them: batches to fit on, and the temperature of
choices."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from knn_moe.adapt.calibrate.objective import find_temperature
from knn_moe.config import HeldOutConfig
from knn_moe.reference.choices import ChoiceTokens
from knn_moe.reference.splits import Part, Splits, split
from knn_moe.reference.windows import Batch, ReferenceTokens
from knn_moe.routers.model_state import freeze

# A pass has at least this many steps, of at least this many tokens each.
_STEPS_A_PASS, _LEAST_TOKENS = 24, 64


def split_for(
    model: nn.Module, reference: ReferenceTokens, judged: ReferenceTokens, config: HeldOutConfig
) -> Splits:
    """Split both: the first to fit on, the second to choose and judge by."""
    if isinstance(judged, ChoiceTokens):
        batches = split(judged, config).choose.batches(config.step_tokens)
        with freeze(model):
            temperature = find_temperature(model, batches)
        reference = judged = replace(judged, temperature=temperature)
    parts = split(judged, config)
    if judged is reference:
        return parts
    others = split(reference, config)
    return parts._replace(fit=others.fit, held_out=others.held_out)


def cut_into_steps(part: Part, pass_tokens: int, most: int) -> list[Batch]:
    """Cut a part into batches for backward passes: of at most `most` tokens, and so small that a
    pass over `pass_tokens` has some steps."""
    wanted = max(pass_tokens // _STEPS_A_PASS, _LEAST_TOKENS)
    return list(part.batches(min(most, wanted)))
