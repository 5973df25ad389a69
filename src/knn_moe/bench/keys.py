"""Keys to measure search on; never for quality on text.

For a layer alone they are made up: points around centres, with a spectrum that falls as a power, so
that what a projection keeps and what a partition finds is neither everything nor nothing. For a
running model they are its own router inputs on random tokens: what it then asks is spread alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.memory.gamma import estimate_gamma
from knn_moe.memory.manifest import MemoryManifest
from knn_moe.memory.memory import LayerMemory, RoutingMemory
from knn_moe.reference.provenance import Provenance
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.fingerprint import identify
from knn_moe.routers.intercept import Callback, RouterHook

_CENTRES: Final = 2000
_SPREAD: Final = 0.7  # around a centre, against one between centres
_BLOCK: Final = 1 << 14
_WINDOW: Final = 512  # random tokens that are read together
_WINDOWS: Final = 16  # at a time: 8,192 tokens
_NOISE: Final = 0.1  # of a value, against the router's own logits


def made_up_keys(
    count: int, width: int, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Shape [count, width]. One seed's centres serve all: only the points differ."""
    fixed = torch.Generator(device=device).manual_seed(0)
    centres = torch.randn(_CENTRES, width, generator=fixed, device=device)
    scale = torch.arange(1, width + 1, device=device).float() ** -0.5
    draw = torch.Generator(device=device).manual_seed(seed + 1)
    keys = torch.empty(count, width, dtype=dtype, device=device)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        of = torch.randint(_CENTRES, (size,), generator=draw, device=device)
        noise = torch.randn(size, width, generator=draw, device=device)
        keys[start : start + size] = ((centres[of] + _SPREAD * noise) * scale).to(dtype)
    return keys


def made_up_layer(keys: Tensor, experts: int) -> LayerMemory:
    """A layer of these keys, with values at random and a γ that suits their distances."""
    draw = torch.Generator(device=keys.device).manual_seed(0)
    values = torch.randn(len(keys), experts, generator=draw, device=keys.device)
    sample = keys[:1024].float()
    distance = float((sample - sample.roll(1, 0)).square().sum(dim=-1).mean())
    return LayerMemory(keys, values, 1 / distance if distance else 1.0)


@torch.no_grad()
def own_memory(model: Any, count: int, on_step: Callable[[str], None]) -> RoutingMemory:
    """What `model`'s routers see of random tokens, with about the logits they gave it.

    `count` cases a layer, on the CPU: only what is attached lies on the device.
    """
    routers = find_routers(model)
    begin = torch.cat([torch.arange(0, count, _WINDOW), torch.tensor([count])])
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, model.config.vocab_size, (len(begin) - 1, _WINDOW), generator=draw)
    rows = {router.layer: _Rows(router, count) for router in routers}
    with _watched(routers, {layer: part.take for layer, part in rows.items()}):
        for at, windows in enumerate(tokens.split(_WINDOWS)):
            on_step(f"keys: {at * _WINDOWS * _WINDOW:,} of {count:,}")
            model(windows.to(model.device), use_cache=False, logits_to_keep=1)
    window = torch.arange(len(begin) - 1, dtype=torch.int32)
    stream = tokens.flatten()[:count].int()
    provenance = Provenance(
        stream, begin, window, torch.zeros_like(window), torch.arange(count, dtype=torch.int64)
    )
    example, case = provenance.example, provenance.prefix_hash()
    layers = {}
    for layer, part in rows.items():
        on_step(f"γ of layer {layer}")
        gamma = estimate_gamma(part.keys, example, case, model.device)
        layers[layer] = LayerMemory(part.keys, part.values, gamma)
    manifest = MemoryManifest(base_model=identify(model, routers))
    return RoutingMemory(layers=layers, provenance=provenance, manifest=manifest)


class _Rows:
    """One layer's cases, filled call by call."""

    def __init__(self, router: Router, count: int) -> None:
        self.keys = torch.empty(count, router.hidden_size, dtype=router.weight.dtype)
        self.values = torch.empty(count, router.num_experts)
        self.filled = 0

    def take(self, inputs: Tensor, logits: Tensor) -> Tensor:
        """Shapes: inputs [T, d]; logits [T, N], given back as they are."""
        place = slice(self.filled, self.filled + len(inputs))
        room = len(self.keys[place])
        self.keys[place] = inputs[:room].to(self.keys.dtype).cpu()
        own = logits[:room].float()
        self.values[place] = (own + _NOISE * torch.randn_like(own)).cpu()
        self.filled += room
        return logits


@contextmanager
def _watched(routers: list[Router], callbacks: Mapping[int, Callback]) -> Iterator[None]:
    """While inside, each router's inputs and logits go to its layer's callback."""
    handles: list[Any] = []
    try:
        for router in routers:
            handles += RouterHook(router, callbacks[router.layer]).install()
        yield
    finally:
        for handle in handles:
            handle.remove()
