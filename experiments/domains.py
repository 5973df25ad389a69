"""Whether a merged memory gains from a γ for each of its domains, on text the models never saw.

    python models/domains.py tiny-olmoe --sequences 200 --windows 40 --out docs/measurements/domains

For each model strong memories of medical and of sql text, and both as one, with one γ and with
each domain's own. On test windows of each domain: the model alone, the domain's own memory, the
merged ones, and both attached with the right one chosen. Writes OUT/MODEL.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from audit import device_name
from knn_moe import RoutingMemory, attach_all
from knn_moe.tasks.likelihood import TokenLosses, token_losses
from measure import DOMAINS, LENGTH, Bench, common_parser, compare

ONE, EACH = "merged, one γ", "merged, γ of each domain"


def main() -> None:
    parser = common_parser((__doc__ or "").splitlines()[0], windows=200)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        bench = Bench.load(name, options.data, options.device)
        memories = {domain: bench.build(domain, "strong", options.sequences) for domain in DOMAINS}
        first, *others = memories.values()
        merged = {ONE: first.merge(*others), EACH: first.merge(*others, by_domain=True)}
        rows = [
            row
            for domain in DOMAINS
            for row in try_domain(bench, memories, merged, domain, options.windows)
        ]
        found = {
            "model": Path(name).name,
            "sequences": options.sequences,
            "windows": options.windows,
            "device": device_name(options.device),
            "gammas": {
                str(index): dict(
                    zip(("joint", *DOMAINS), (layer.gamma, *layer.gammas), strict=True)
                )
                for index, layer in merged[EACH].layers.items()
            },
            "rows": rows,
        }
        text = json.dumps(found, indent=1, ensure_ascii=False)
        (options.out / f"{found['model']}.json").write_text(f"{text}\n", encoding="utf8")


def try_domain(
    bench: Bench,
    memories: dict[str, RoutingMemory],
    merged: dict[str, RoutingMemory],
    domain: str,
    windows: int,
) -> list[dict[str, Any]]:
    """One row for each way; the last merged one is also compared with the first."""
    test = bench.test(domain, windows)
    alone = bench.losses(test)
    ways = {"zero-shot": alone, "own memory": bench.losses(test, memories[domain])}
    ways |= {way: bench.losses(test, memory) for way, memory in merged.items()}
    ways["the right one chosen"] = chosen(bench, memories, domain, test)
    rows = []
    for way, found in ways.items():
        row = {"domain": domain, "way": way, **compare(found, alone)}
        if way == EACH:
            row["against_one_gamma"] = compare(found, ways[ONE])["nll_change"]
        rows.append(row)
        print(bench.model.config.name_or_path, row, flush=True)
    return rows


def chosen(
    bench: Bench, memories: dict[str, RoutingMemory], domain: str, test: Tensor
) -> TokenLosses:
    """All are attached, and the domain's own is used."""
    with attach_all(bench.model, memories) as routing, routing.using(domain):
        return token_losses(bench.model, test, max(bench.batch_tokens // LENGTH, 1))


if __name__ == "__main__":
    main()
