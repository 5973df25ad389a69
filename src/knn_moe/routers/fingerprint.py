"""Identify the model and the tokenizer that a memory belongs to.

A model's fingerprint is a hash of its router weights, rounded to bf16: a checkpoint has the same
one in float32 and in bf16. float16 rounds otherwise, so a memory also has a sketch of the weights,
from which the distance to a model's weights can be told. Where a process has only some layers of a
model, each layer's own digest is compared.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knn_moe.errors import UnsupportedModelError
from knn_moe.routers.find import Router
from knn_moe.routers.model_state import offload_hooks, unwrap
from knn_moe.support.embedded_models import public_name

_SUMS: Final = 32  # of a weight's sketch
_TOLERANCE: Final = 2**-7  # of a weight's norm


@dataclass(frozen=True)
class ModelIdentity:
    """A model's name, for people, and its fingerprint, for comparison."""

    name: str
    revision: str | None
    architecture: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.name!r} ({self.architecture}, routers {self.fingerprint[:12]})"


@dataclass(frozen=True)
class RouterSketch:
    """Sums of the routers' weights, one row for each weight, and the precision they were in."""

    dtype: str
    sums: tuple[tuple[float, ...], ...]


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
        _add_router(digest, router)
    return digest.hexdigest()


def layer_digests(routers: list[Router]) -> dict[str, str]:
    """Return a fingerprint of each router alone, by its layer's number.

    A process that has only some layers of a model recognises it by these.
    """
    digests = {}
    for router in routers:
        digest = hashlib.sha256()
        _add_router(digest, router)
        digests[str(router.layer)] = digest.hexdigest()
    return digests


def _add_router(digest: Any, router: Router) -> None:
    """Add a router's shape and weights to a digest."""
    digest.update(f"{router.layer} {router.num_experts} {router.hidden_size}\n".encode())
    for weight in _weights(router):
        values = weight.to("cpu", torch.bfloat16)
        digest.update(values.contiguous().view(torch.int16).numpy().tobytes())


def sketch_weights(routers: list[Router]) -> RouterSketch:
    """Return a sketch of the routers' weights.

    For each weight it has 32 sums, each of every 32nd element with pseudo-random signs. The squared
    differences of two sketches' sums add up to about the squared distance of the weights.
    """
    weights = [weight for router in routers for weight in _weights(router)]
    rounded = (tuple(float(f"{x:.6g}") for x in _sketch(weight)) for weight in weights)
    return RouterSketch(_dtype(routers), tuple(rounded))


def matches_sketch(sketch: RouterSketch | None, routers: list[Router]) -> bool:
    """Return whether the routers' weights are those of `sketch` in another precision.

    Only float16 needs it: in other precisions the fingerprint tells, to the last bit. Every weight
    must be nearer than 2⁻⁷ of its norm; rounding moves it by at most 2⁻⁸ of it. A weight that was
    changed by less cannot be told from a rounded one.
    """
    if sketch is None or "float16" not in (sketch.dtype, _dtype(routers)):
        return False
    weights = [weight for router in routers for weight in _weights(router)]
    if len(weights) != len(sketch.sums) or any(len(row) != _SUMS for row in sketch.sums):
        return False
    for weight, stored in zip(weights, sketch.sums, strict=True):
        distance = math.dist(_sketch(weight), stored)
        if not distance <= _TOLERANCE * float(weight.double().norm()):
            return False
    return True


def _weights(router: Router) -> Iterator[Tensor]:
    """Yield the router's parameters but LoRA's, on any device."""
    for name, parameter in sorted(router.module.named_parameters()):
        if "lora_" not in name:
            yield _materialise(router.module, name, parameter).detach()


def _dtype(routers: list[Router]) -> str:
    return str(routers[0].weight.dtype).removeprefix("torch.")


def _sketch(weight: Tensor) -> list[float]:
    """Return 32 signed sums of the elements."""
    values = weight.to("cpu", torch.float64).flatten()
    mixed = torch.arange(len(values)) * 0x9E3779B1 & 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # MurmurHash3's mix: the same on every machine
        mixed = (mixed ^ mixed >> 15) * factor & 0xFFFFFFFF
    signed = torch.where((mixed >> 16) % 2 == 0, values, -values)
    padding = -len(values) % _SUMS
    sums: list[float] = F.pad(signed, (0, padding)).view(-1, _SUMS).sum(dim=0).tolist()
    return sums


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
