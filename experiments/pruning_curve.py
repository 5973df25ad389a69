"""How much of its gain does a memory keep when it is pruned?

    python experiments/pruning_curve.py tiny-olmoe --memories OUT --out docs/measurements/prune

Prunes a memory of medical text, built with large steps, to smaller and smaller shares and measures
each on the validation split, which has no part in the pruning. Ways to choose the cases:

    loss                   `knn-moe prune`: the cases that lower the loss of other examples most
    chance                 `knn-moe prune --by chance`: exact repeats first, then at random
    random                 at random, repeats included
    calibrated             by chance, then calibrated; the whole memory is calibrated as well
    loss, then calibrated  what the product refuses: the examples that chose the cases judge them

Memories are kept in the folder --memories, except calibrated ones. Writes OUT/MODEL.json after
every row, so that a stopped run continues, and OUT/curve.svg.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import torch

from common import (
    LARGE,
    NEAR,
    Arguments,
    MeasurementFile,
    ModelUnderTest,
    Row,
    compare_losses,
    device_name,
    measuring_parser,
    save_plot,
)
from knn_moe import RoutingMemory, calibrate, prune

SHARES: Final = (0.5, 0.25, 0.1, 0.05)
WHOLE: Final = "whole"
CALIBRATED: Final = "calibrated"
LOSS_CALIBRATED: Final = "loss, then calibrated"
WAYS: Final = ("loss", "random", "chance", CALIBRATED, LOSS_CALIBRATED)


def main(arguments: Arguments = None) -> None:
    """Measure every model, write one file for each, and plot all files of the folder."""
    parser = measuring_parser(__doc__, sequences=800, windows=200)
    parser.add_argument("--memories", type=Path, required=True, help="folder for the memories")
    parser.add_argument(
        "--ways", nargs="*", default=WAYS, choices=WAYS, help="how to choose the cases"
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="*",
        default=SHARES,
        choices=SHARES,
        help="shares of the cases to keep",
    )
    options = parser.parse_args(arguments)
    for name in options.models:
        subject = ModelUnderTest.load(name, options.data, options.device)
        folder = options.memories / f"{subject.name}-{options.sequences}"
        memories = PrunedMemories(subject, folder, options.sequences)
        facts = {
            "model": subject.name,
            "sequences": options.sequences,
            "windows": options.windows,
            "device": device_name(options.device),
            "cases": len(memories.whole),
            "repeats": len(memories.whole) - len(memories.whole.provenance.prefix_hash().unique()),
        }
        file = MeasurementFile(options.out / f"{subject.name}.json", facts)
        wanted = [(WHOLE, 1.0), *((way, share) for way in options.ways for share in options.shares)]
        if CALIBRATED in options.ways:
            wanted.append((CALIBRATED, 1.0))
        measure_curve(subject, memories, wanted, file)
    plot_curves(options.out)


class PrunedMemories:
    """A memory and what it is pruned to, in folders beside each other."""

    def __init__(self, subject: ModelUnderTest, folder: Path, sequences: int) -> None:
        self.subject = subject
        self.folder = folder
        if not folder.exists():
            subject.build(NEAR, LARGE, sequences).save_pretrained(folder)
        self.whole = RoutingMemory.from_pretrained(folder, verify=False)

    def get(self, way: str, share: float) -> RoutingMemory:
        """Return the memory pruned to `share` in the given way."""
        if way == CALIBRATED:
            return self._calibrate(self.get("chance", share))
        if way == LOSS_CALIBRATED:  # calibrate refuses a memory that says it was pruned by loss
            small = self.get("loss", share)
            return self._calibrate(replace(small, manifest=replace(small.manifest, pruned=None)))
        if share == 1:
            return self.whole
        folder = self.folder.with_name(f"{self.folder.name}-{way}-{share}")
        if not folder.exists():
            size = round(share * len(self.whole))
            if way == "random":
                self._prune_at_random(size, folder)
            else:
                self._prune(way, share, size, folder)
        return RoutingMemory.from_pretrained(folder, verify=False)

    def _calibrate(self, memory: RoutingMemory) -> RoutingMemory:
        return calibrate(self.subject.model, memory).apply(memory)

    def _prune(self, way: str, share: float, size: int, folder: Path) -> None:
        """Prune what the next larger share has left."""
        larger = self.get(way, (1.0, *SHARES)[SHARES.index(share)])
        by: Literal["loss", "chance"] = "loss" if way == "loss" else "chance"
        prune(self.subject.model, larger, size / len(larger), by=by, folder=folder)

    def _prune_at_random(self, size: int, folder: Path) -> None:
        """Keep the first `size` of one random order, so that smaller shares are parts of larger."""
        order = torch.randperm(len(self.whole), generator=torch.Generator().manual_seed(0))
        self.whole.subset(order[:size].sort().values, folder=folder)


def measure_curve(
    subject: ModelUnderTest,
    memories: PrunedMemories,
    wanted: Sequence[tuple[str, float]],
    file: MeasurementFile,
) -> None:
    """Add one row for each way and share, the whole memory first, unless the file has it."""
    test = subject.test_windows(NEAR, file.facts["windows"])
    base = subject.losses(test)
    for way, share in wanted:
        if file.has(way=way, keep=share):
            continue
        memory = memories.get(way, share)
        change = compare_losses(subject.losses(test, memory), base)
        whole = file.rows[0] if file.rows else change
        kept = change["nll_change"]["difference"] / whole["nll_change"]["difference"]
        facts = {"way": way, "keep": share, "cases": len(memory)}
        file.add({**facts, "share_of_gain": round(kept, 4), **change})


def plot_curves(folder: Path) -> None:
    """Plot the share of the gain against the share of the cases, one panel for each model."""
    from matplotlib.figure import Figure

    files = [json.loads(path.read_text(encoding="utf8")) for path in sorted(folder.glob("*.json"))]
    figure = Figure(figsize=(4 * len(files), 3.4), layout="constrained")
    panels = figure.subplots(1, len(files), sharey=True, squeeze=False)[0]
    for axes, found in zip(panels, files, strict=True):
        for way, marker in zip(WAYS, "os^vx", strict=True):
            rows = curve_of(found["rows"], way)
            if len(rows) > 1:
                shares = [row["share_of_gain"] for row in rows]
                axes.plot([row["keep"] for row in rows], shares, marker=marker, label=way)
        axes.axhline(0.95, color="grey", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks([1.0, *SHARES], ["all", *(f"{share:.0%}" for share in SHARES)])
        axes.set_title(f"{found['model']}, {found['cases']:,} cases", fontsize=10)
        axes.set_xlabel("cases kept")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share of the gain kept")
    panels[0].legend(frameon=False, fontsize=9)
    save_plot(figure, folder / "curve.svg")


def curve_of(rows: list[Row], way: str) -> list[Row]:
    """Return the rows of one way, from the smallest share to the whole memory."""
    whole = CALIBRATED if way == CALIBRATED else WHOLE  # calibrated memories have their own whole
    return sorted((r for r in rows if r["way"] in (whole, way)), key=lambda row: row["keep"])


if __name__ == "__main__":
    main()
