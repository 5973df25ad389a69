"""A little text in the form of the data folder, and the smallest model to train on it."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

from corpus import SEEN
from train import Recipe

RECIPE = Recipe(
    name="least",
    model_type="olmoe",
    config={
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
    epochs=2,
    length=32,
    batch=4,
    learning_rate=1e-2,
)
STEPS = 30  # of its training
SUBJECTS = ("the cat", "a judge", "my list", "that dose", "one row", "her friend")


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    with gzip.open(path, "wt", encoding="utf8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def make_sentences(domain: str, seed: str, count: int) -> str:
    generator = random.Random(domain + seed)
    return " ".join(
        f"{generator.choice(SUBJECTS)} in {domain} {generator.randrange(100)}."
        for _ in range(count)
    )


def write_corpus(folder: Path) -> Path:
    """Write six training documents of each domain and two validation documents.

    Of medical text there are ninety shorter ones, because calibration needs many examples.
    """
    for split, count in (("train", 6), ("valid", 2)):
        for domain in (*SEEN, "medical", "sql"):
            parts = 15 if (domain, split) == ("medical", "train") else 1
            texts = (
                make_sentences(domain, f"{split} {n}", 30 // parts) for n in range(count * parts)
            )
            rows = [{"text": text} for text in texts]
            write_rows(folder / f"text_{domain}_{split}.jsonl.gz", rows)
        problems = [
            {
                "question": make_sentences("sums", f"{split} {n}", 15),
                "solution": f"It is {n}. " * 40,
            }
            for n in range(count)
        ]
        name = {"train": "gsm8k_ref", "valid": "gsm8k_test"}[split]
        write_rows(folder / f"{name}.jsonl.gz", problems)
    return folder
