"""Find the layers and tokens whose rerouting ruins a model.

    python experiments/fragile_layers.py OUT/smol-moe --out OUT/fragile.json

Adds noise to the routing logits, in units of their spread in each layer, and measures how much the
loss of all tokens rises: noise on the first token of each text or on all others, in all layers, and
on first tokens in one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from common import Arguments, ModelUnderTest, Row, add_data_and_device, make_parser, write_json
from knn_moe.routers.find import find_routers
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks
from knn_moe.tasks.likelihood import token_losses

_SIZES: Final = (0.1, 0.3, 1.0)  # of the noise, in spreads

Chosen = Callable[[Tensor], Tensor]  # places in their texts → whether they are rerouted


def main(arguments: Arguments = None) -> None:
    """Measure one model and write its rows."""
    parser = make_parser(__doc__)
    parser.add_argument("model", help="embedded model or model folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    add_data_and_device(parser)
    parser.add_argument("--domain", default="medical", help="text to read (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=24, help="texts (default: %(default)s)")
    parser.add_argument("--length", type=int, default=96, help="tokens (default: %(default)s)")
    options = parser.parse_args(arguments)
    under_test = ModelUnderTest.load(options.model, options.data, options.device)
    windows = under_test.test_windows(options.domain, options.windows)[:, : options.length]
    rows = measure(under_test, windows)
    for row in rows:
        print(row, flush=True)
    write_json(options.out, rows)


def measure(under_test: ModelUnderTest, windows: Tensor) -> list[Row]:
    """Return the rise of the loss for every way to reroute."""
    routers = find_routers(under_test.model)
    layers = [router.layer for router in routers]
    ways: dict[str, Chosen] = {"first": lambda place: place == 0, "other": lambda place: place > 0}
    alone = loss_with_noise(under_test, windows, 0.0, ways["first"], layers)
    rows: list[Row] = [{"loss": round(alone, 4)}]
    tried: list[tuple[float, str, Collection[int]]] = [
        *((size, tokens, layers) for size in _SIZES for tokens in ways),
        *((1.0, "first", [layer]) for layer in layers),
    ]
    for size, tokens, chosen in tried:
        rise = loss_with_noise(under_test, windows, size, ways[tokens], chosen) - alone
        shown = "all" if chosen is layers else next(iter(chosen))
        rows.append({"noise": size, "tokens": tokens, "layer": shown, "rise": round(rise, 4)})
    return rows


def loss_with_noise(
    under_test: ModelUnderTest,
    windows: Tensor,
    size: float,
    chosen: Chosen,
    layers: Collection[int],
) -> float:
    """Return the loss per token with noise on the logits of some tokens, the same in every call."""

    def disturb(layer: int, inputs: Tensor, logits: Tensor) -> Tensor:
        place = torch.arange(len(logits), device=logits.device) % windows.shape[1]
        generator = torch.Generator().manual_seed(layer)
        noise = torch.randn(logits.shape, generator=generator).to(logits)
        spread = (logits - logits.mean(dim=-1, keepdim=True)).square().mean().sqrt()
        return logits + size * spread * noise * chosen(place)[:, None]

    hooks = [
        RouterHook(router, partial(disturb, router.layer))
        for router in find_routers(under_test.model)
        if router.layer in layers
    ]
    with install_hooks(hooks):
        losses = token_losses(under_test.model, windows, len(windows))
    return float(losses.nll.mean())


if __name__ == "__main__":
    main()
