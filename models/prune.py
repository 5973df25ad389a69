"""What a pruned memory keeps of its gain, on text the models never saw.

    python models/prune.py tiny-olmoe tiny-qwen3 --sequences 60 --windows 40 \\
        --out docs/measurements/prune

For each model a strong memory of medical text, pruned smaller and smaller: by the loss, by the
values alone, at random, and at random after exact repeats. The gain is of the validation split,
which has no part in the pruning. `--reestimate` also tries each with γ computed anew. Writes
OUT/MODEL.json and OUT/curve.svg.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audit import device_name
from knn_moe import RoutingMemory, prune
from knn_moe.pruning.prune import best
from measure import Bench, common_parser, compare

DOMAIN = "medical"
SHARES = (0.5, 0.25, 0.1, 0.05)
WAYS = ("loss", "values", "random", "repeats")


def main() -> None:
    parser = common_parser((__doc__ or "").splitlines()[0], windows=200)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--memories", type=Path, help="folder of memories, to keep and to find")
    parser.add_argument("--reestimate", action="store_true", help="also with γ computed anew")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        bench = Bench.load(name, options.data, options.device)
        memory = build(bench, Path(name).name, options)
        found: dict[str, Any] = {
            "model": Path(name).name,
            "sequences": options.sequences,
            "windows": options.windows,
            "device": device_name(options.device),
            "cases": len(memory),
            "repeats": len(memory) - len(memory.provenance.prefix_hash().unique()),
            "rows": [],
        }
        file = options.out / f"{found['model']}.json"
        before = json.loads(file.read_text(encoding="utf8")) if file.exists() else found
        if {**before, "rows": []} == found:  # ways tried another time, of the same memory
            found["rows"] = [row for row in before["rows"] if row["way"] not in options.ways]
        for row in curve(bench, memory, options):
            found["rows"] = [*(old for old in found["rows"] if not same(old, row)), row]
            print(found["model"], row, flush=True)
            file.write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf8")
    plot(options.out)


def build(bench: Bench, name: str, options: Any) -> RoutingMemory:
    if options.memories is None:
        return bench.build(DOMAIN, "strong", options.sequences)
    folder = options.memories / f"{name}-{options.sequences}"
    if not folder.exists():
        bench.build(DOMAIN, "strong", options.sequences).save_pretrained(folder)
    return RoutingMemory.from_pretrained(folder)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("way", "keep"))


def curve(bench: Bench, memory: RoutingMemory, options: Any) -> Any:
    """One row for the whole memory, and one for each way and share."""
    test = bench.test(DOMAIN, options.windows)
    alone = bench.losses(test)
    gain = compare(bench.losses(test, memory), alone)
    yield {"way": "whole", "keep": 1.0, "cases": len(memory), "share_of_gain": 1.0, **gain}
    whole = gain["nll_change"]["difference"]
    for way in options.ways:
        left = memory
        for share in SHARES:
            left = pruner(bench, memory, way)(left, round(share * len(memory)))
            tried = {way: left}
            if options.reestimate:
                tried[f"{way}, γ anew"] = left.merge()
            for name, small in tried.items():
                row = compare(bench.losses(test, small), alone)
                kept = round(row["nll_change"]["difference"] / whole, 4)
                facts = {"way": name, "keep": share, "cases": len(small), "share_of_gain": kept}
                yield {**facts, **row}


def pruner(
    bench: Bench, memory: RoutingMemory, way: str
) -> Callable[[RoutingMemory, int], RoutingMemory]:
    """Makes the memory before smaller still: each share is cut from the one above it."""
    if way in ("loss", "values"):
        model = bench.model if way == "loss" else None
        return lambda left, size: prune(model, left, size / len(left))
    drawn = torch.rand(len(memory), generator=torch.Generator().manual_seed(0))

    def draw(left: RoutingMemory, size: int) -> RoutingMemory:
        place: Tensor = torch.searchsorted(memory.provenance.key, left.provenance.key)
        case = left.provenance.prefix_hash() if way == "repeats" else torch.arange(len(left))
        return left.subset(best(drawn[place], case, size))

    return draw


def plot(folder: Path) -> None:
    """Share of the gain against share of the cases, one panel a model."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "knn-moe"  # the same plot, byte for byte
    from matplotlib import pyplot

    files = sorted(folder.glob("*.json"))
    figure, panels = pyplot.subplots(
        1,
        len(files),
        figsize=(4 * len(files), 3.4),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axes, file in zip(panels[0], files, strict=True):
        found = json.loads(file.read_text(encoding="utf8"))
        for way, marker in zip(WAYS, "osD^", strict=True):
            rows = [row for row in found["rows"] if row["way"] in ("whole", way)]
            sizes = [row["keep"] for row in rows]
            axes.plot(sizes, [row["share_of_gain"] for row in rows], marker=marker, label=way)
        axes.axhline(0.95, color="grey", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks([1.0, *SHARES], ["all", *(f"{share:.0%}" for share in SHARES)])
        axes.set_title(f"{found['model']}, {found['cases']:,} cases", fontsize=10)
        axes.set_xlabel("cases kept")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("share of the gain kept")
    panels[0][0].legend(frameon=False, fontsize=9)
    figure.savefig(folder / "curve.svg", metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
