"""How much do the paper's and calibrated memories gain on unseen text, and how does that grow?

    python experiments/measure_presets.py tiny-olmoe OUT/olmoe-80m --out docs/measurements

Measures each model on medical (near) and SQL (far) text: without a memory, with one by the
preset `paper`, with a calibrated one, and with its values shuffled as a control. Then builds
memories of medical text from larger and larger reference sets. Writes OUT/MODEL.json, from which
`publish.py` makes the model cards and docs/growth.svg.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from common import (
    DOMAINS,
    NEAR,
    Arguments,
    ModelUnderTest,
    Row,
    compare_losses,
    device_name,
    measuring_parser,
    write_json,
)
from knn_moe.adapt.controls import shuffle_values

CALIBRATED: Final = "calibrated"
SIZES: Final = (50, 100, 200, 400, 800, 1600, 3200)


def main(arguments: Arguments = None) -> None:
    """Measure every model and write one file for each."""
    parser = measuring_parser(__doc__, sequences=800, windows=200)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="*",
        default=SIZES,
        help="reference sequences of the growth curve (default: 50 to 3,200)",
    )
    options = parser.parse_args(arguments)
    for name in options.models:
        subject = ModelUnderTest.load(name, options.data, options.device)
        found: Row = {
            "model": subject.name,
            "sequences": options.sequences,
            "device": device_name(options.device),
            "table": measure_table(subject, options.sequences, options.windows),
        }
        path = options.out / f"{subject.name}.json"
        write_json(path, found)  # the growth takes as long again
        found["growth"] = measure_growth(subject, options.sizes, options.windows)
        write_json(path, found)


def measure_table(subject: ModelUnderTest, sequences: int, windows: int) -> list[Row]:
    """Return one row for each domain and way to use the model."""
    rows = []
    for domain in DOMAINS:
        test = subject.test_windows(domain, windows)
        base = subject.losses(test)
        rows.append({"domain": domain, "way": "zero-shot", **compare_losses(base)})
        calibrated = subject.build(domain, CALIBRATED, sequences)
        memories = {
            "paper": subject.build(domain, "paper", sequences),
            CALIBRATED: calibrated,
            "shuffled": shuffle_values(calibrated),
        }
        for way, memory in memories.items():
            change = compare_losses(subject.losses(test, memory), base)
            rows.append({"domain": domain, "way": way, **change})
            print(subject.name, rows[-1], flush=True)
    return rows


def measure_growth(subject: ModelUnderTest, sizes: Sequence[int], windows: int) -> list[Row]:
    """Return one row for each size of the reference set and way to build, on medical text."""
    test = subject.test_windows(NEAR, windows)
    base = subject.losses(test)
    rows = []
    for size in sizes:
        for way in ("paper", CALIBRATED):
            losses = subject.losses(test, subject.build(NEAR, way, size))
            rows.append({"sequences": size, "way": way, **compare_losses(losses, base)})
            print(subject.name, rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
