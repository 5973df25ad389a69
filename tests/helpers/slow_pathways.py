"""The plain way to route the last token of a prompt: read the whole sequence, without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from knn_moe.routers.find import find_routers
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks


@contextmanager
def _route_token(model: PreTrainedModel, place: int, routing: Tensor) -> Iterator[None]:
    """Route token `place` of a sequence without padding or cache by `routing` [L, N]."""
    hooks = []
    for router, row in zip(find_routers(model)[-len(routing) :], routing, strict=True):

        def replace(inputs: Tensor, logits: Tensor, row: Tensor = row) -> Tensor:
            return torch.cat([logits[:place], row[None], logits[place + 1 :]])

        hooks.append(RouterHook(router, replace))
    with install_hooks(hooks):
        yield


def slow_logits(
    model: PreTrainedModel, prompt: Sequence[int], more: Sequence[int], routing: Tensor
) -> Tensor:
    """Return the logits after the prompt and each token of `more`. Result [1 + len(more), V]."""
    with _route_token(model, len(prompt) - 1, routing):
        output = model(torch.tensor([[*prompt, *more]]), use_cache=False)
    return output.logits[0, len(prompt) - 1 :]


def count_hooks(model: PreTrainedModel) -> int:
    """Return the number of hooks on all modules."""
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
