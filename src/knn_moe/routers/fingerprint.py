"""Identify the model and the tokenizer that a memory belongs to.

A model's fingerprint is a hash of its router weights, rounded to bf16: a checkpoint has the same
one in every precision.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knn_moe.errors import UnsupportedModelError
from knn_moe.routers.find import Router
from knn_moe.routers.model_state import offload_hooks, unwrap
from knn_moe.support.embedded_models import public_name


@dataclass(frozen=True)
class ModelIdentity:
    """A model's name, for people, and its fingerprint, for comparison."""

    name: str
    revision: str | None
    architecture: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.name!r} ({self.architecture}, routers {self.fingerprint[:12]})"


def identify(model: nn.Module, routers: list[Router]) -> ModelIdentity:
    """Return the identity of `model`, whose routers are `routers`.

    Raises:
        UnsupportedModelError: The weights of a router have not been loaded.
    """
    config: Any = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "") or getattr(config, "name_or_path", "")
    inner = unwrap(model)
    return ModelIdentity(
        name=public_name(name) if name else type(inner).__name__,
        revision=getattr(config, "_commit_hash", None),
        architecture=type(inner).__name__,
        fingerprint=fingerprint(routers),
    )


def fingerprint(routers: list[Router]) -> str:
    """Return the SHA-256 of the routers' shapes and weights; LoRA's weights do not count."""
    digest = hashlib.sha256()
    for router in routers:
        digest.update(f"{router.layer} {router.num_experts} {router.hidden_size}\n".encode())
        for name, parameter in sorted(router.module.named_parameters()):
            if "lora_" in name:
                continue
            values = _materialise(router.module, name, parameter).detach().to("cpu", torch.bfloat16)
            digest.update(values.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _materialise(module: nn.Module, name: str, parameter: Tensor) -> Tensor:
    """Return the parameter, also if accelerate keeps it elsewhere until its module runs."""
    if not parameter.is_meta:
        return parameter
    owner, _, leaf = name.rpartition(".")
    for hook in offload_hooks(module.get_submodule(owner)):
        weights = getattr(hook, "weights_map", None)
        if weights is not None:
            value: Tensor = weights[leaf]
            return value
    raise UnsupportedModelError(
        f"The router weight {name!r} has no data (it is on the meta device). Load the model's "
        f"weights first."
    )


def identify_tokenizer(tokenizer: Any) -> dict[str, str | None]:
    """Return the tokenizer's name, and hashes of its vocabulary with its rules and of its chat
    template."""
    template = getattr(tokenizer, "chat_template", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        rules.pop("padding", None)
        rules.pop("truncation", None)
    else:
        rules = sorted(tokenizer.get_vocab().items())
    return {
        "name": public_name(str(getattr(tokenizer, "name_or_path", ""))),
        "fingerprint": _hash(rules),
        "chat_template": None if template is None else _hash(template),
    }


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
