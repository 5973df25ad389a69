"""What does a calibrated memory do to text of other domains, and how does that depend on its reach?

    knn-moe build tiny-olmoe sql.jsonl -o memory --calibrate
    python experiments/other_text.py tiny-olmoe memory --out OUT.json

Reads windows of each domain with the model alone and with the memory, whose γ of λ (confidence) is
multiplied by each of the factors: 1 is the memory as it is, less is a wider reach.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common import (
    Arguments,
    ModelUnderTest,
    Row,
    add_data_and_device,
    compare_losses,
    make_parser,
    write_json,
)
from knn_moe import RoutingConfig, RoutingMemory, attach


def main(arguments: Arguments = None) -> None:
    """Measure one memory and write its rows."""
    parser = make_parser(__doc__)
    parser.add_argument("model", help="embedded model or model folder")
    parser.add_argument("memory", type=Path, help="folder of a memory")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    add_data_and_device(parser)
    parser.add_argument("--domains", nargs="+", default=["sql", "medical", "fiction", "python"])
    parser.add_argument("--factors", nargs="+", type=float, default=[0.25, 1.0, 4.0])
    parser.add_argument("--windows", type=int, default=16, help="of 256 tokens (%(default)s)")
    options = parser.parse_args(arguments)
    under_test = ModelUnderTest.load(options.model, options.data, options.device)
    memory = RoutingMemory.from_pretrained(options.memory)
    rows: list[Row] = []
    for domain in options.domains:
        rows += measure(under_test, memory, domain, options.factors, options.windows)
    write_json(options.out, rows)


def measure(
    under_test: ModelUnderTest,
    memory: RoutingMemory,
    domain: str,
    factors: list[float],
    count: int,
) -> list[Row]:
    """Return the change of the loss and the mean λ on a domain, a row for each factor."""
    windows = under_test.test_windows(domain, count)
    alone = under_test.losses(windows)
    rows = []
    for factor in factors:
        with attach(under_test.model, memory, reaching(memory, factor)) as routing:
            losses = under_test.losses(windows)
        layers = routing.stats().values()
        confidence = sum(layer.mean_confidence for layer in layers) / max(len(layers), 1)
        row = {"domain": domain, "factor": factor, "mean_confidence": round(confidence, 3)}
        rows.append({**row, **compare_losses(losses, alone)})
        print(domain, factor, rows[-1]["nll_change"], row["mean_confidence"], flush=True)
    return rows


def reaching(memory: RoutingMemory, factor: float) -> RoutingConfig:
    """Return the memory's routing with the γ of λ multiplied by `factor`."""
    widths = [memory.routing.for_layer(layer) for layer in memory.layers]
    scaled = (replace(one, confidence_scale=one.confidence_scale * factor) for one in widths)
    return replace(memory.routing, per_layer=tuple(scaled))


if __name__ == "__main__":
    main()
