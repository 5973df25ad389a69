"""What labels of a model's own are worth, against true ones, in a memory of the same size.

    python models/labels.py tiny-olmoe --domain sql --out docs/measurements/labels

Texts are cut into a prompt of 64 tokens and the 64 that follow. Memories of what follows: as the
text has it, as the model itself goes on (the likeliest, a sample, or of twice as many prompts the
half it is surest of), and one of the prompts alone, which as plain text are their own labels. Each
is tried on held-out text of the domain. Writes OUT/MODEL.json, a domain at a time.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from corpus import read_texts
from knn_moe import BuildConfig, LabelConfig, RoutingMemory, build_memory, control, label
from knn_moe.reference import Example
from measure import Bench, common_parser, compare

PART = 64  # tokens of a prompt, and of what follows
OWN = LabelConfig(keep=1.0, max_new_tokens=PART)
SAMPLE = replace(  # of two samples that differ, the first
    OWN, by="agreement", samples=2, temperature=1.0, keep=None, threshold=0.0
)


def main() -> None:
    parser = common_parser((__doc__ or "").splitlines()[0], windows=32)
    parser.set_defaults(sequences=64)
    parser.add_argument("--domain", default="medical", choices=("medical", "sql"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        bench = Bench.load(name, options.data, options.device)
        rows = table(bench, options.domain, options.sequences, options.windows)
        _write(options.out / f"{Path(name).name}.json", options, rows)


def cut(bench: Bench, domain: str, count: int) -> list[Example]:
    """The first tokens of texts, in the order of the data: prompts, and what follows."""
    found = []
    for text in read_texts(bench.data, domain, "train"):
        ids = bench.tokenizer(text)["input_ids"][: 2 * PART]
        parts = [bench.tokenizer.decode(part) for part in (ids[:PART], ids[PART:])]
        if len(ids) == 2 * PART:
            found.append(Example(*parts))
        if len(found) == count:
            return found
    raise SystemExit(f"{domain} has {len(found)} texts of {2 * PART} tokens; {count} are needed.")


def table(bench: Bench, domain: str, sequences: int, windows: int) -> list[dict[str, Any]]:
    """One row for each kind of label."""
    test = bench.test(domain, windows)
    alone = bench.losses(test)
    true = cut(bench, domain, 2 * sequences)
    prompts = [example.prompt for example in true]
    greedy = label(bench.model, bench.tokenizer, prompts, OWN)
    surest = sorted(greedy, key=lambda one: -one.score)[:sequences]
    sampled = label(bench.model, bench.tokenizer, prompts[:sequences], SAMPLE)
    labels = {
        "true": true[:sequences],
        "greedy": [one.example for one in greedy[:sequences]],
        "surest half": [one.example for one in surest],
        "sampled": [one.example for one in sampled],
    }
    rows = [{"domain": domain, "labels": "none", **compare(alone, alone)}]

    def add(name: str, memory: RoutingMemory) -> None:
        found = compare(bench.losses(test, memory), alone)
        rows.append({"domain": domain, "labels": name, "cases": len(memory), **found})
        print(bench.model.config.name_or_path, rows[-1], flush=True)

    for name, examples in labels.items():
        memory = _build(bench, examples)
        add(name, memory)
        if name == "true":
            add("true, control: own logits", control(memory, "own-logits", bench.model))
    add("none: the prompts as text", _build(bench, [Example.of(x) for x in prompts[:sequences]]))
    return rows


def _build(bench: Bench, examples: list[Example]) -> RoutingMemory:
    """Of completions only. A plain text has no token before its first: it is all completion."""
    config = BuildConfig(preset="strong", tokens="completion", batch_tokens=bench.batch_tokens)
    return build_memory(bench.model, bench.tokenizer, examples, config)


def _write(path: Path, options: Any, rows: list[dict[str, Any]]) -> None:
    """Rows of the other domain stay."""
    known = json.loads(path.read_text(encoding="utf8"))["rows"] if path.is_file() else []
    others = [row for row in known if row["domain"] != options.domain]
    found = {"model": path.stem, "sequences": options.sequences, "windows": options.windows}
    found["rows"] = sorted([*others, *rows], key=lambda row: row["domain"])
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
