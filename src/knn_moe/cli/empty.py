"""A model's structure without its weights."""

from __future__ import annotations

from typing import Any

from knn_moe.errors import ModelError


def empty_model(name: str) -> Any:
    """The model class of a folder or hub id, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(f"Cannot load a causal language model from {name!r}: {reason}") from None
