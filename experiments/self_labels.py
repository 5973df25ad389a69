"""What labels of a model's own are worth, against true ones, in a memory of the same size.

    python models/labels.py tiny-olmoe --domain sql --out docs/measurements/labels

Texts are cut into a prompt of 64 tokens and the 64 that follow. Memories of what follows: as the
text has it, as the model itself goes on (the likeliest, a sample, or of twice as many prompts the
half it is surest of), and one of the prompts alone, which as plain text are their own labels. Each
is tried on held-out text of the domain. Writes OUT/MODEL.json row by row: a run that is stopped
goes on.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from corpus import read_texts
from knn_moe import BuildConfig, LabelConfig, RoutingMemory, build_memory, control, label
from knn_moe.reference.examples import Example
from measure import Bench, common_parser, compare

TRUE = "true"
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
        sizes = {"sequences": options.sequences, "windows": options.windows}
        rows = Rows(options.out / f"{Path(name).name}.json", sizes)
        measure(bench, options.domain, options.sequences, options.windows, rows)


class Rows:
    """A file of rows, written one by one: what is there is not measured again."""

    def __init__(self, path: Path, sizes: dict[str, int]) -> None:
        self.path, self.sizes = path, sizes
        self.found: list[dict[str, Any]] = []
        known = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
        if all(known.get(name) == size for name, size in sizes.items()):
            self.found = known["rows"]

    def has(self, domain: str, labels: str) -> bool:
        return any((row["domain"], row["labels"]) == (domain, labels) for row in self.found)

    def add(self, row: dict[str, Any]) -> None:
        print(self.path.stem, row, flush=True)
        self.found = sorted([*self.found, row], key=lambda one: str(one["domain"]))
        facts = {"model": self.path.stem, **self.sizes, "rows": self.found}
        self.path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf8")


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


def measure(bench: Bench, domain: str, sequences: int, windows: int, rows: Rows) -> None:
    """One row for each kind of label."""
    test = bench.test(domain, windows)
    alone = bench.losses(test)
    if not rows.has(domain, "zero-shot"):
        rows.add({"domain": domain, "labels": "zero-shot", **compare(alone, alone)})
    for name, examples in labels_of(bench, domain, sequences).items():
        if rows.has(domain, name):
            continue
        memory = _build(bench, examples)
        ways = {name: memory}
        if name == TRUE:
            ways = {f"{TRUE}, own logits": control(memory, "own-logits", bench.model), **ways}
        for way, one in ways.items():
            found = compare(bench.losses(test, one), alone)
            rows.add({"domain": domain, "labels": way, "cases": len(one), **found})


def labels_of(bench: Bench, domain: str, sequences: int) -> dict[str, list[Example]]:
    """As many examples for each kind."""
    true = cut(bench, domain, 2 * sequences)
    prompts = [example.prompt for example in true]
    greedy = label(bench.model, bench.tokenizer, prompts, OWN)
    surest = sorted(greedy, key=lambda one: -one.score)[:sequences]
    sampled = label(bench.model, bench.tokenizer, prompts[:sequences], SAMPLE)
    return {
        TRUE: true[:sequences],
        "greedy": [one.example for one in greedy[:sequences]],
        "greedy, surest half": [one.example for one in surest],
        "sampled": [one.example for one in sampled],
        "the prompts as text": [Example.of(prompt) for prompt in prompts[:sequences]],
    }


def _build(bench: Bench, examples: list[Example]) -> RoutingMemory:
    """Of completions only, all of a plain text being one."""
    config = BuildConfig(preset="strong", tokens="completion", batch_tokens=bench.batch_tokens)
    return build_memory(bench.model, bench.tokenizer, examples, config)


if __name__ == "__main__":
    main()
