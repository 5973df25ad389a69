"""How much does a memory of the model's own answers gain, compared with true answers?

    python experiments/self_labels.py tiny-olmoe --domain sql --out docs/measurements/labels

Cuts texts into a prompt of 64 tokens and a completion of the next 64. Builds memories of the same
size from true completions, from the model's own (greedy, the half it is surest of, sampled) and
from the prompts as plain text, and measures each on held-out text of the domain. Writes
OUT/MODEL.json after every row, and a stopped run continues with the rows it has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from common import (
    DOMAINS,
    Arguments,
    MeasurementFile,
    ModelUnderTest,
    compare_losses,
    measuring_parser,
)
from corpus import read_texts
from knn_moe import LabelConfig, RoutingMemory, control, label
from knn_moe.reference.examples import Example

TRUE: Final = "true"
PART: Final = 64  # tokens of a prompt, and of its completion
GREEDY: Final = LabelConfig(keep=1.0, max_new_tokens=PART)
SAMPLED: Final = replace(  # takes the first of two samples, whether they agree or not
    GREEDY, by="agreement", samples=2, temperature=1.0, keep=None, threshold=0.0
)


def main(arguments: Arguments = None) -> None:
    """Measure every model and write one file for each."""
    parser = measuring_parser(__doc__, sequences=64, windows=32)
    parser.add_argument("--domain", default=DOMAINS[0], choices=DOMAINS, help="domain of the text")
    options = parser.parse_args(arguments)
    for name in options.models:
        subject = ModelUnderTest.load(name, options.data, options.device)
        facts = {
            "model": subject.name,
            "sequences": options.sequences,
            "windows": options.windows,
        }
        file = MeasurementFile(options.out / f"{subject.name}.json", facts)
        measure_labels(subject, options.domain, file)


def measure_labels(subject: ModelUnderTest, domain: str, file: MeasurementFile) -> None:
    """Add one row for each kind of label, unless the file has it."""
    test = subject.test_windows(domain, file.facts["windows"])
    base = subject.losses(test)
    if not file.has(domain=domain, labels="zero-shot"):
        file.add({"domain": domain, "labels": "zero-shot", **compare_losses(base)})
    for labels, examples in label_texts(subject, domain, file.facts["sequences"]).items():
        if file.has(domain=domain, labels=labels):
            continue
        memory = build_from_completions(subject, examples)
        memories = {labels: memory}
        if labels == TRUE:
            own_logits = control(memory, "own-logits", subject.model)
            memories = {f"{TRUE}, own logits": own_logits, **memories}
        for name, one in memories.items():
            change = compare_losses(subject.losses(test, one), base)
            file.add({"domain": domain, "labels": name, "cases": len(one), **change})


def label_texts(subject: ModelUnderTest, domain: str, sequences: int) -> dict[str, list[Example]]:
    """Return `sequences` examples for each kind of label."""
    true = split_texts(subject, domain, 2 * sequences)
    prompts = [example.prompt for example in true]
    greedy = label(subject.model, subject.tokenizer, prompts, GREEDY)
    surest = sorted(greedy, key=lambda one: -one.score)[:sequences]
    sampled = label(subject.model, subject.tokenizer, prompts[:sequences], SAMPLED)
    return {
        TRUE: true[:sequences],
        "greedy": [one.example for one in greedy[:sequences]],
        "greedy, surest half": [one.example for one in surest],
        "sampled": [one.example for one in sampled],
        "the prompts as text": [Example.of(prompt) for prompt in prompts[:sequences]],
    }


def split_texts(subject: ModelUnderTest, domain: str, count: int) -> list[Example]:
    """Split the beginnings of the first long enough texts into prompt and completion."""
    found = []
    for text in read_texts(subject.data, domain, "train"):
        ids = subject.tokenizer(text)["input_ids"][: 2 * PART]
        if len(ids) == 2 * PART:
            parts = [subject.tokenizer.decode(part) for part in (ids[:PART], ids[PART:])]
            found.append(Example(*parts))
        if len(found) == count:
            return found
    raise SystemExit(
        f"{domain} has {len(found)} texts of at least {2 * PART} tokens, but {count} are needed. "
        f"Use fewer --sequences."
    )


def build_from_completions(subject: ModelUnderTest, examples: list[Example]) -> RoutingMemory:
    """Build a memory from completions; a plain text counts as a completion."""
    return subject.build_large(examples, tokens="completion", batch_tokens=subject.batch_tokens)


if __name__ == "__main__":
    main()
