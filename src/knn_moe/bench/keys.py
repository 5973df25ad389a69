"""Keys to measure the search on; never for quality on text.

For a layer alone they are made up: points around centres, with a spectrum that falls as a power, so
that a projection keeps, and a partition finds, neither everything nor nothing. For a running model
they are its own router inputs on random tokens, which its later queries resemble.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.memory.gamma import estimate_gamma
from knn_moe.memory.layers import LayerMemory
from knn_moe.memory.manifest import MemoryManifest
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.provenance import Provenance
from knn_moe.routers.find import Router, find_routers
from knn_moe.routers.fingerprint import identify
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks
from knn_moe.support.progress import OnProgress, Progress, ignore_progress

_CENTRES: Final = 2000
_SPREAD: Final = 0.7  # around a centre; centres are spread by one
_BLOCK: Final = 1 << 14
_WINDOW: Final = 512  # random tokens in a sequence
_WINDOWS: Final = 16  # sequences in a batch
_NOISE: Final = 0.1  # added to the router's own logits


def made_up_keys(
    count: int, width: int, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Draw keys around centres. Every seed has the same centres. Shape [count, width]."""
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
    """Return a layer of these keys [M, d], with random values and a γ that suits the distances."""
    draw = torch.Generator(device=keys.device).manual_seed(0)
    values = torch.randn(len(keys), experts, generator=draw, device=keys.device)
    sample = keys[:1024].float()
    distance = float((sample - sample.roll(1, 0)).square().sum(dim=-1).mean())
    return LayerMemory(keys, values, 1 / distance if distance else 1.0)


@torch.no_grad()
def record_memory(
    model: Any, count: int, on_progress: OnProgress = ignore_progress
) -> RoutingMemory:
    """Record what the model's routers see on random tokens, with logits close to their own.

    The memory has `count` cases for each layer, on the CPU.
    """
    routers = find_routers(model)
    begin = torch.cat([torch.arange(0, count, _WINDOW), torch.tensor([count])])
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, model.config.vocab_size, (len(begin) - 1, _WINDOW), generator=draw)
    cases = {router.layer: _LayerCases(router, count) for router in routers}
    with install_hooks([RouterHook(router, cases[router.layer].add) for router in routers]):
        for at, windows in enumerate(tokens.split(_WINDOWS)):
            on_progress(Progress("reading random tokens", at * _WINDOWS * _WINDOW, count))
            model(windows.to(model.device), use_cache=False, logits_to_keep=1)
    window = torch.arange(len(begin) - 1, dtype=torch.int32)
    stream = tokens.flatten()[:count].int()
    provenance = Provenance(
        stream, begin, window, torch.zeros_like(window), torch.arange(count, dtype=torch.int64)
    )
    example, case = provenance.example, provenance.prefix_hash()
    layers = {}
    for done, (layer, part) in enumerate(cases.items()):
        on_progress(Progress("estimating γ of each layer", done, len(cases)))
        gamma = estimate_gamma(part.keys, example, case, model.device)
        layers[layer] = LayerMemory(part.keys, part.values, gamma)
    manifest = MemoryManifest(base_model=identify(model, routers))
    return RoutingMemory(layers=layers, provenance=provenance, manifest=manifest)


class _LayerCases:
    """One layer's cases, added call by call until there are `count`."""

    def __init__(self, router: Router, count: int) -> None:
        self.keys = torch.empty(count, router.hidden_size, dtype=router.weight.dtype)
        self.values = torch.empty(count, router.num_experts)
        self.filled = 0

    def add(self, inputs: Tensor, logits: Tensor) -> Tensor:
        """Return the logits unchanged. Shapes: inputs [T, d]; logits [T, N]."""
        place = slice(self.filled, self.filled + len(inputs))
        room = len(self.keys[place])
        self.keys[place] = inputs[:room].to(self.keys.dtype).cpu()
        own = logits[:room].float()
        self.values[place] = (own + _NOISE * torch.randn_like(own)).cpu()
        self.filled += room
        return logits
