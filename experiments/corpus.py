"""The training text, its tokenizer, and windows of tokens cut from it.

Knows the files of the data folder (`text_DOMAIN_SPLIT.jsonl.gz`); nothing of models.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

SEEN = ("fiction", "textbook", "legal", "python", "tinystories")
UNSEEN = ("medical", "sql", "gsm8k")

END, PAD = "<|endoftext|>", "<|pad|>"


def default_data() -> Path:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("KNN_MOE_DATA") or beside)


def read_texts(data: Path, domain: str, split: str) -> list[str]:
    """The documents of a domain; of the maths problems, question and solution together."""
    if domain == "gsm8k":
        name = {"train": "gsm8k_ref", "valid": "gsm8k_test"}[split]
        return [f"{row['question']}\n{row['solution']}" for row in _rows(data / f"{name}.jsonl.gz")]
    return [row["text"] for row in _rows(data / f"text_{domain}_{split}.jsonl.gz")]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf8") as lines:
        for line in lines:
            yield json.loads(line)


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Byte-level BPE; digits stand alone, so that no number is a token of its own."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END, eos_token=END, pad_token=PAD
    )


def encode(tokenizer: Any, texts: Sequence[str]) -> list[Tensor]:
    """The tokens of each document, its end marked. Shapes: [length] int32."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(list(texts))
    end = tokenizer.eos_token_id
    return [torch.tensor([*encoding.ids, end], dtype=torch.int32) for encoding in encodings]


def windows(
    documents: Sequence[Tensor], length: int, generator: torch.Generator | None = None
) -> Tensor:
    """Documents end to end, cut into windows; with a generator, shuffled. Shape [W, length]."""
    if generator is None:
        order, skip = list(range(len(documents))), 0
    else:
        order = torch.randperm(len(documents), generator=generator).tolist()
        skip = int(torch.randint(length, (), generator=generator))
    stream = torch.cat([documents[place] for place in order])[skip:]
    whole = stream[: len(stream) // length * length].view(-1, length)
    if generator is None:
        return whole
    return whole[torch.randperm(len(whole), generator=generator)]


def sample_texts(tokenizer: Any, texts: Sequence[str], tokens: int, skip: int = 0) -> list[str]:
    """Documents in a fixed random order that hold `tokens` tokens together, after the first
    `skip` tokens; the last one is cut."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    chosen: list[str] = []
    passed = 0
    for place in order:
        ids = tokenizer(texts[place])["input_ids"]
        room = skip + tokens - passed
        if passed >= skip:
            chosen.append(texts[place] if len(ids) <= room else tokenizer.decode(ids[:room]))
        elif passed + len(ids) > skip:
            skip = passed + len(ids)  # a document is skipped whole
        passed += len(ids)
        if passed >= skip + tokens:
            return chosen
    raise ValueError(f"There are {passed:,} tokens of text; {skip + tokens:,} were asked for.")
