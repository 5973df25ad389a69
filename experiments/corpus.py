"""Read the training text, train its tokenizer, and cut token windows.

Shared by the scripts; not a script of its own. It knows the files of the data folder
(`text_DOMAIN_SPLIT.jsonl.gz`, `gsm8k_*.jsonl.gz`) and nothing about models.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

SEEN: Final = ("fiction", "textbook", "legal", "python", "tinystories")
UNSEEN: Final = ("medical", "sql", "gsm8k")
END: Final = "<|endoftext|>"
PAD: Final = "<|pad|>"
WINDOW: Final = 256  # tokens in a window that a model is measured on
_VALIDATION_WINDOWS: Final = 200  # of each domain


def find_data_folder() -> Path:
    """Return the folder that KNN_MOE_DATA names, or `shared/data` beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("KNN_MOE_DATA") or beside)


def read_texts(data: Path, domain: str, split: str) -> list[str]:
    """Read the documents of a domain; a maths problem and its solution are one document.

    Args:
        data: The data folder.
        domain: One of SEEN or UNSEEN.
        split: "train" or "valid".
    """
    if domain == "gsm8k":
        name = {"train": "gsm8k_ref", "valid": "gsm8k_test"}[split]
        rows = _read_rows(data / f"{name}.jsonl.gz")
        return [f"{row['question']}\n{row['solution']}" for row in rows]
    return [row["text"] for row in _read_rows(data / f"text_{domain}_{split}.jsonl.gz")]


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf8") as lines:
        for line in lines:
            yield json.loads(line)


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Train a byte-level BPE tokenizer in which every digit is a token of its own."""
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
    special = {"bos_token": END, "eos_token": END, "pad_token": PAD}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)  # type: ignore[no-untyped-call]


def encode_documents(tokenizer: Any, texts: Sequence[str]) -> list[Tensor]:
    """Tokenise each document and append the end token. Shapes: [length] int32 each."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(list(texts))
    end = tokenizer.eos_token_id
    return [torch.tensor([*encoding.ids, end], dtype=torch.int32) for encoding in encodings]


def cut_windows(
    documents: Sequence[Tensor], length: int, generator: torch.Generator | None = None
) -> Tensor:
    """Join documents end to end and cut them into windows; a generator shuffles both.

    Shape: [windows, length].
    """
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


def load_validation_windows(
    tokenizer: Any, data: Path, domains: Sequence[str]
) -> dict[str, Tensor]:
    """Load the first windows of each domain's validation text. Shapes: [windows, WINDOW]."""
    found = {}
    for domain in domains:
        documents = encode_documents(tokenizer, read_texts(data, domain, "valid"))
        found[domain] = cut_windows(documents, WINDOW)[:_VALIDATION_WINDOWS].long()
    return found


def sample_texts(tokenizer: Any, texts: Sequence[str], tokens: int, skip: int = 0) -> list[str]:
    """Choose documents in a fixed random order until they hold `tokens` tokens.

    Args:
        tokenizer: Counts the tokens.
        texts: The documents.
        tokens: How many tokens the sample holds; the last document is cut to fit.
        skip: Leave out the documents that hold the first `skip` tokens of the same order.

    Raises:
        ValueError: There are fewer tokens than that.
    """
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
    raise ValueError(f"The texts hold {passed:,} tokens, but {skip + tokens:,} are needed.")
