"""A check that a model is left exactly as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel


def _snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that a method must leave as it was, except for the weights' values."""
    return {
        "weights": [(name, each.data_ptr()) for name, each in model.state_dict().items()],
        "gradients": {name: each.grad for name, each in model.named_parameters()},
        "trainable": {name: each.requires_grad for name, each in model.named_parameters()},
        "modules": {
            name: (type(module), module.training, list(module._forward_hooks), sorted(vars(module)))
            for name, module in model.named_modules()
        },
        "configs": (model.config.to_dict(), model.generation_config.to_dict()),
        "experts": model.config._experts_implementation,
        "random states": (random.getstate(), str(np.random.get_state())),
        "torch's random state": torch.get_rng_state().tolist(),
    }


@contextmanager
def left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Check that the code inside leaves a model, which is in training mode, as it was."""
    model.train()  # as a user may have it
    model.model.embed_tokens.weight.requires_grad_(False)
    before = _snapshot(model)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    try:
        yield
        assert _snapshot(model) == before
        assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    finally:
        model.eval()
        model.model.embed_tokens.weight.requires_grad_(True)
