"""What a pruned memory keeps of its gain, on text the models never saw.

    python models/prune.py tiny-olmoe tiny-qwen3 --sequences 48 --windows 40 \\
        --memories OUT --out docs/measurements/prune

For each model a strong memory of medical text, pruned smaller and smaller: by the loss, by the
values alone, at random, and by chance, which lets exact repeats go first; each share is cut from
the one above it. "calibrated": what chance left is calibrated, and so is the whole;
"loss, then calibrated": what it would come to if examples judged what they chose. The gain is of
the validation split, which has no part in the pruning. `--anew` also tries the others with γ
computed anew. Memories are kept in OUT, but for calibrated ones, and a run that was stopped goes on
from them. Writes MODEL.json and curve.svg.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from audit import device_name
from knn_moe import RoutingMemory, calibrate, prune
from knn_moe.adapt.prune.prune import best
from measure import Bench, common_parser, compare

DOMAIN = "medical"
SHARES = (0.5, 0.25, 0.1, 0.05)
CALIBRATED, TOO_LATE = "calibrated", "loss, then calibrated"
WAYS = ("loss", "values", "random", "chance", CALIBRATED, TOO_LATE)
WHOLE, ANEW = "whole", ", γ anew"


def main() -> None:
    parser = common_parser((__doc__ or "").splitlines()[0], windows=200)
    parser.add_argument("--memories", type=Path, required=True, help="folder for the memories")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES, choices=SHARES)
    parser.add_argument("--anew", action="store_true", help="also with γ computed anew")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        bench = Bench.load(name, options.data, options.device)
        folder = options.memories / f"{Path(name).name}-{options.sequences}"
        memories = Memories(bench, folder, options.sequences)
        found = {
            "model": Path(name).name,
            "sequences": options.sequences,
            "windows": options.windows,
            "device": device_name(options.device),
            "cases": len(memories.whole),
            "repeats": len(memories.whole) - len(memories.whole.provenance.prefix_hash().unique()),
        }
        file = options.out / f"{found['model']}.json"
        for rows in curve(bench, memories, found_before(file, found), options):
            text = json.dumps({**found, "rows": rows}, indent=1, ensure_ascii=False)
            file.write_text(f"{text}\n", encoding="utf8")
    plot(options.out)


def found_before(file: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier run on the same memory."""
    if not file.exists():
        return []
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
    rows: list[dict[str, Any]] = found.pop("rows")
    return rows if found == facts else []


class Memories:
    """The whole memory and what it is pruned to, on disk."""

    def __init__(self, bench: Bench, folder: Path, sequences: int) -> None:
        self.bench = bench
        self.folder = folder
        if not folder.exists():
            bench.build(DOMAIN, "strong", sequences).save_pretrained(folder)
        self.whole = RoutingMemory.from_pretrained(folder, verify=False)
        self.drawn = torch.rand(len(self.whole), generator=torch.Generator().manual_seed(0))

    def pruned(self, way: str, share: float) -> RoutingMemory:
        """By `way`, from the next larger share."""
        if way == CALIBRATED:
            return self._calibrated(self.pruned("chance", share))
        if way == TOO_LATE:  # which calibrate would refuse
            small = self.pruned("loss", share)
            return self._calibrated(replace(small, manifest=replace(small.manifest, pruned=None)))
        if share == 1:
            return self.whole
        folder = self.folder.with_name(f"{self.folder.name}-{way}-{share}")
        if not folder.exists():
            larger = [1.0, *SHARES][SHARES.index(share)]
            size = round(share * len(self.whole))
            self._cut(self.pruned(way, larger), way, size, folder)
        return RoutingMemory.from_pretrained(folder, verify=False)

    def _calibrated(self, memory: RoutingMemory) -> RoutingMemory:
        found = calibrate(self.bench.model, memory)
        print(f"calibrated: promised {found.judgement.change.difference:+.3f}", flush=True)
        return found.apply(memory)

    def _cut(self, left: RoutingMemory, way: Any, size: int, folder: Path) -> None:
        if way == "random":
            place = torch.searchsorted(self.whole.provenance.key, left.provenance.key)
            rows = best(self.drawn[place], torch.arange(len(left)), size)
            left.subset(rows, folder=folder)
        else:
            prune(self.bench.model, left, size / len(left), by=way, folder=folder)


def curve(
    bench: Bench, memories: Memories, rows: list[dict[str, Any]], options: Any
) -> Iterator[list[dict[str, Any]]]:
    """The rows so far, after each of them: the whole memory's, then by way and share."""
    test = bench.test(DOMAIN, options.windows)
    wanted = [(WHOLE, 1.0)]
    wanted += [(way, share) for way in options.ways for share in options.shares]
    if CALIBRATED in options.ways:
        wanted.append((CALIBRATED, 1.0))
    if options.anew:  # what is calibrated has widths of its own
        plain = [(way, share) for way, share in wanted[1:] if CALIBRATED not in way]
        wanted += [(f"{way}{ANEW}", share) for way, share in plain]
    known = {(row["way"], row["keep"]) for row in rows}
    alone = bench.losses(test)
    for way, share in wanted:
        if (way, share) not in known:
            small = memories.pruned(way.removesuffix(ANEW), share)
            small = small.merge() if way.endswith(ANEW) else small
            found = compare(bench.losses(test, small), alone)
            whole = rows[0] if rows else found
            kept = found["nll_change"]["difference"] / whole["nll_change"]["difference"]
            facts = {"way": way, "keep": share, "cases": len(small)}
            rows = [*rows, {**facts, "share_of_gain": round(kept, 4), **found}]
            print(bench.model.config.name_or_path, rows[-1], flush=True)
        yield rows


def plot(folder: Path) -> None:
    """Share of the gain against share of the cases, one panel a model."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "knn-moe"  # the same plot, byte for byte
    from matplotlib import pyplot

    files = sorted(folder.glob("*.json"))
    size = (4 * len(files), 3.4)
    figure, panels = pyplot.subplots(
        1, len(files), figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for axes, file in zip(panels[0], files, strict=True):
        found = json.loads(file.read_text(encoding="utf8"))
        for way, marker in zip(WAYS, "osD^vx", strict=True):
            begin = way if way == CALIBRATED else WHOLE
            rows = [row for row in found["rows"] if row["way"] in (begin, way)]
            rows.sort(key=lambda row: row["keep"])
            if len(rows) > 1:
                shares = [row["share_of_gain"] for row in rows]
                axes.plot([row["keep"] for row in rows], shares, marker=marker, label=way)
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
