"""How much of the exact search's gain does a faster index keep?

    python experiments/index_quality.py tiny-olmoe OUT/olmoe-80m --out docs/measurements/retrieval

Builds memories of medical text with the paper's step and with larger ones, and attaches each with
every index in INDEXES. Measures on test text how often the nearest case is the same as in an exact
search, the mean error of the confidence (λ), and the share of the exact search's gain. Writes
OUT/MODEL.json after every row, and a stopped run continues with the rows it has.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from common import (
    LARGE,
    NEAR,
    Arguments,
    MeasurementFile,
    ModelUnderTest,
    compare_losses,
    device_name,
    measuring_parser,
)
from knn_moe import attach
from knn_moe.index import ExactIndex, IndexConfig
from knn_moe.inference.attach import Routing
from knn_moe.recall.layer import LayerRecall, RouterCall

EXACT: Final = "exact"
INDEXES: Final = {
    EXACT: None,
    "fast": IndexConfig(kind="fast"),
    "fast, values of 4 bits": IndexConfig(kind="fast", value_bits=4),
    "fast, keys of 8 bits": IndexConfig(kind="fast", bits=8),
    "fast, 64 dims": IndexConfig(kind="fast", dims=64),
    "fast, 128 dims": IndexConfig(kind="fast", dims=128),
    "fast, 64 dims, ranked again": IndexConfig(kind="fast", dims=64, rerank=True),
    "ivfpq": IndexConfig(kind="ivfpq"),
    "ivfpq, ranked again": IndexConfig(kind="ivfpq", rerank=True),
}
_SEARCHED: Final = 4  # test windows whose tokens are searched both ways


def main(arguments: Arguments = None) -> None:
    """Measure every model and write one file for each."""
    parser = measuring_parser(__doc__, sequences=800, windows=200)
    parser.add_argument(
        "--ways", nargs="*", default=["paper", LARGE], help="ways to build the memories"
    )
    parser.add_argument(
        "--indexes",
        nargs="*",
        default=list(INDEXES),
        choices=list(INDEXES),
        help="indexes to measure; the exact search is always among them",
    )
    options = parser.parse_args(arguments)
    indexes = [name for name in INDEXES if name == EXACT or name in options.indexes]
    for name in options.models:
        subject = ModelUnderTest.load(name, options.data, options.device)
        facts = {
            "model": subject.name,
            "sequences": options.sequences,
            "device": device_name(options.device),
        }
        file = MeasurementFile(options.out / f"{subject.name}.json", facts)
        for way in options.ways:
            missing = [index for index in indexes if not file.has(way=way, index=index)]
            if missing:
                measure_indexes(subject, way, missing, options.windows, file)


def measure_indexes(
    subject: ModelUnderTest, way: str, indexes: list[str], windows: int, file: MeasurementFile
) -> None:
    """Add one row for each index."""
    memory = subject.build(NEAR, way, file.facts["sequences"])
    test = subject.test_windows(NEAR, windows)
    base = subject.losses(test)
    device = subject.model.device
    exact = {n: ExactIndex(layer.keys.to(device)) for n, layer in memory.full_layers().items()}
    for name in indexes:
        if "ivfpq" in name and importlib.util.find_spec("faiss") is None:
            print(f"{name} is left out: faiss is not installed.")
            continue
        started = time.perf_counter()
        with attach(subject.model, memory, replace(memory.routing, index=INDEXES[name])) as routing:
            attached = time.perf_counter()
            change = compare_losses(subject.losses(test), base)
            finished = time.perf_counter()
            agreement = measure_agreement(subject, routing, exact, test[:_SEARCHED])
        gain = change["nll_change"]["difference"]
        whole = gain if name == EXACT else exact_gain(file, way)
        file.add(
            {
                "way": way,
                "index": name,
                "share_of_gain": round(gain / whole, 4),
                **agreement,
                **change,
                "seconds_to_attach": round(attached - started, 2),
                "seconds_to_run": round(finished - attached, 2),
            }
        )


def exact_gain(file: MeasurementFile, way: str) -> float:
    """Return the change in nats per token that the exact search brought."""
    wanted = {"way": way, "index": EXACT}
    row = next(row for row in file.rows if wanted.items() <= row.items())
    gain: float = row["nll_change"]["difference"]
    return gain


@torch.no_grad()
def measure_agreement(
    subject: ModelUnderTest, routing: Routing, exact: dict[int, ExactIndex], windows: Tensor
) -> dict[str, float]:
    """Compare the attached index with an exact search for the same router inputs.

    Returns:
        `recall`: the share of tokens with the same nearest case. `confidence_error`: the mean
        |λ - λ of the exact search|. Both are means over layers and tokens.
    """
    hits, errors = [], []

    def compare(call: RouterCall) -> None:
        assert isinstance(call.recall, LayerRecall)
        distances, rows = call.recall.nearest(call.inputs)
        true_distances, true_rows = exact[call.layer].search(call.inputs, rows.shape[1])
        hits.append((rows[:, 0] == true_rows[:, 0]).float().mean())
        confidence = call.recall.confidence(distances)
        errors.append((confidence - call.recall.confidence(true_distances)).abs().mean())

    with routing.observed(compare):
        subject.model(windows.to(subject.model.device), use_cache=False)
    return {
        "recall": round(float(torch.stack(hits).mean()), 4),
        "confidence_error": round(float(torch.stack(errors).mean()), 5),
    }


if __name__ == "__main__":
    main()
