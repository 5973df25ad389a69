"""What a quicker index costs in quality, on real keys: text the models never saw.

    python models/retrieval.py tiny-olmoe OUT/olmoe-80m --out docs/measurements/retrieval

For each model and preset, a memory of medical text, searched exactly and by other indexes: how
often the nearest case is the same, how far off the confidence λ is, and what is kept of the exact
search's gain in nats per token. Recall and λ are of test tokens, not of the memory's own. Writes
OUT/MODEL.json.
"""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audit import device_name
from knn_moe import RoutingConfig, RoutingMemory, attach
from knn_moe.index import IndexConfig
from knn_moe.inference.attach import Routing
from knn_moe.recall.recall import LayerRecall, RouterCall
from knn_moe.tasks.likelihood import token_losses
from measure import LENGTH, Bench, common_parser, compare

DOMAIN = "medical"
ASKED = 4  # test windows whose tokens are looked up both ways

INDEXES = {
    "exact": None,
    "fast": IndexConfig(kind="fast"),
    "fast, values of 4 bits": IndexConfig(kind="fast", value_bits=4),
    "fast, keys of 8 bits": IndexConfig(kind="fast", bits=8),
    "fast, 64 dims": IndexConfig(kind="fast", dims=64),
    "fast, 128 dims": IndexConfig(kind="fast", dims=128),
    "fast, 64 dims, ranked again": IndexConfig(kind="fast", dims=64, rerank=True),
    "ivfpq": IndexConfig(kind="ivfpq"),
    "ivfpq, ranked again": IndexConfig(kind="ivfpq", rerank=True),
}


def main() -> None:
    parser = common_parser((__doc__ or "").splitlines()[0], windows=200)
    parser.add_argument("--presets", nargs="*", default=["paper", "strong"])
    parser.add_argument("--indexes", nargs="*", default=list(INDEXES), choices=list(INDEXES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        bench = Bench.load(name, options.data, options.device)
        rows = []
        for preset in options.presets:
            memory = bench.build(DOMAIN, preset, options.sequences)
            for row in try_indexes(bench, memory, options.indexes, options.windows):
                rows.append({"preset": preset, **row})
                print(Path(name).name, rows[-1], flush=True)
        found = {
            "model": Path(name).name,
            "sequences": options.sequences,
            "device": device_name(options.device),
            "rows": rows,
        }
        text = json.dumps(found, indent=1)
        (options.out / f"{found['model']}.json").write_text(f"{text}\n", encoding="utf8")


def try_indexes(
    bench: Bench, memory: RoutingMemory, names: list[str], windows: int
) -> list[dict[str, Any]]:
    """One row for each index; the exact search comes first."""
    test = bench.test(DOMAIN, windows)
    alone = bench.losses(test)
    rows: list[dict[str, Any]] = []
    gain = float("nan")
    for name in names:
        if "ivfpq" in name and importlib.util.find_spec("faiss") is None:
            continue
        config = replace(memory.routing, index=INDEXES[name])
        started = time.perf_counter()
        with attach(bench.model, memory, config) as routing:
            ready = time.perf_counter()
            batch = max(bench.batch_tokens // LENGTH, 1)
            found = compare(token_losses(bench.model, test, batch), alone)
            ran = time.perf_counter()
            agreement = agree(bench, routing, memory, test[:ASKED])
        change = found["nll_change"]["difference"]
        gain = change if name == "exact" else gain
        rows.append(
            {
                "index": name,
                "share_of_gain": round(change / gain, 4),
                **agreement,
                **found,
                "seconds_to_attach": round(ready - started, 2),
                "seconds_to_run": round(ran - ready, 2),
            }
        )
    return rows


@torch.no_grad()
def agree(
    bench: Bench, routing: Routing, memory: RoutingMemory, windows: Tensor
) -> dict[str, float]:
    """Recall@1 and mean |λ - λ_exact| over layers and tokens of `windows`."""
    hits, errors = [], []

    def ask(call: RouterCall) -> None:
        own = call.recall
        exact_config: RoutingConfig = replace(routing.config, index=None)
        layer = memory.layers[call.layer]
        exact = LayerRecall(layer, own.kernel, exact_config, call.inputs.device)
        (d, rows), (true_d, true_rows) = (part.nearest(call.inputs) for part in (own, exact))
        hits.append((rows[:, 0] == true_rows[:, 0]).float().mean())
        found, true = (own.confidence(part) for part in (d, true_d))
        errors.append((found - true).abs().mean())

    with routing.observed(ask):
        bench.model(windows.to(bench.model.device), use_cache=False)
    return {
        "recall": round(float(torch.stack(hits).mean()), 4),
        "confidence_error": round(float(torch.stack(errors).mean()), 5),
    }


if __name__ == "__main__":
    main()
