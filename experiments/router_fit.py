"""Fit routers that send a token to the branch of its domain, without training them.

Shared by `train_smol_moe.py` and the tests; not a script of its own. In each layer a ridge
regression maps the router's input (the feed-forward's input in the dense model) to the domain of
the text that the token is from, as DUME does. It also describes the routers of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.routers.find import find_routers
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks

_BATCH: Final = 16  # windows in a forward pass
_RIDGE: Final = 1e-2  # added to the diagonal of XᵀX, relative to its mean

Visit = Callable[[int, int, Tensor], None]  # layer, domain, router inputs [tokens, d] in fp32


@torch.no_grad()
def fit_domain_rows(dense: Any, windows: Mapping[str, Tensor]) -> Tensor:
    """Fit a router row for each domain in each layer.

    The rows of a layer add up to zero, so that a logit says how much its domain stands out. They
    are scaled so that the logits of a token have a standard deviation of 1 on average.

    Shapes: windows [windows, length] of each domain; returns fp32 [layers, domains, d].
    """
    layers, width = len(dense.model.layers), dense.config.hidden_size
    gram = torch.zeros(layers, width, width, device=dense.device)
    sums = torch.zeros(layers, len(windows), width, device=dense.device)

    def accumulate(layer: int, domain: int, inputs: Tensor) -> None:
        gram[layer].addmm_(inputs.T, inputs)
        sums[layer, domain] += inputs.sum(dim=0)  # XᵀY for one-hot targets Y

    _visit_inputs(dense, windows, accumulate)
    ridge = _RIDGE * gram.diagonal(dim1=1, dim2=2).mean(dim=1)
    gram.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    root = torch.linalg.cholesky(gram.double())
    rows: Tensor = torch.cholesky_solve(sums.double().mT.contiguous(), root).mT.float()
    rows -= rows.mean(dim=1, keepdim=True)
    spreads = torch.zeros(layers, device=dense.device)

    def measure(layer: int, domain: int, inputs: Tensor) -> None:
        spreads[layer] += (inputs @ rows[layer].T).std(dim=-1).sum()

    _visit_inputs(dense, windows, measure)
    tokens = sum(part.numel() for part in windows.values())
    return rows.mul_((tokens / spreads)[:, None, None])


@torch.no_grad()
def domain_accuracy(
    dense: Any, rows: Tensor, windows: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Return the share of each domain's tokens whose largest logit is its own, for each layer.

    Shapes: rows [layers, domains, d].
    """
    right = torch.zeros(len(windows), len(rows), device=rows.device)

    def count(layer: int, domain: int, inputs: Tensor) -> None:
        right[domain, layer] += ((inputs @ rows[layer].T).argmax(dim=-1) == domain).sum()

    _visit_inputs(dense, windows, count)
    return {
        name: [round(hits / part.numel(), 3) for hits in row]
        for (name, part), row in zip(windows.items(), right.tolist(), strict=True)
    }


def _visit_inputs(dense: Any, windows: Mapping[str, Tensor], visit: Visit) -> None:
    """Call `visit` with the input of every feed-forward, for each domain's text."""
    for domain, part in enumerate(windows.values()):

        def pass_on(layer: int, module: Any, args: tuple[Tensor], domain: int = domain) -> None:
            visit(layer, domain, args[0].flatten(0, -2).float())

        hooks = [
            layer.mlp.register_forward_pre_hook(partial(pass_on, place))
            for place, layer in enumerate(dense.model.layers)
        ]
        try:
            for batch in part.split(_BATCH):
                dense.model(batch.to(dense.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()


@torch.no_grad()
def describe_logits(model: Any, windows: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Describe how decided each layer's router is.

    Returns:
        `spread`: the standard deviation of a token's logits over the experts. `gap`: by how much
        the last chosen logit is larger than the first one that is not chosen. Both are averages
        over tokens, one for each layer.
    """
    routers = find_routers(model)
    tokens = sum(part.numel() for part in windows.values())
    sums = torch.zeros(2, len(routers), device=model.device)

    def record(place: int, inputs: Tensor, logits: Tensor) -> Tensor:
        sums[0, place] += logits.float().std(dim=-1).sum()
        largest = logits.float().topk(routers[place].top_k + 1).values
        sums[1, place] += (largest[:, -2] - largest[:, -1]).sum()
        return logits

    hooks = [RouterHook(router, partial(record, place)) for place, router in enumerate(routers)]
    with install_hooks(hooks):
        for part in windows.values():
            for batch in part.split(_BATCH):
                model.model(batch.to(model.device), use_cache=False)
    spread, gap = (sums / tokens).tolist()
    return {"spread": [round(x, 3) for x in spread], "gap": [round(x, 3) for x in gap]}
