"""A task's rows as token ids, in batches: the same for every method that is compared.

Batches hold what is about equally long, so that little is padded; they depend on the rows, the
tokenizer and the batch size alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knn_moe.errors import TaskDataError
from knn_moe.tasks.data import TaskData, row_ids
from knn_moe.tasks.sample import hashed
from knn_moe.tasks.task import Options, Row


@dataclass(frozen=True)
class Question:
    """A row, and what of it a model reads: `ids` of the prompt, of the context before choices, or
    of a window of text. `choices`: token ids after the context, and how many of the first of them
    belong to the context still. `text`: all that is asked and the answer, to tell it by."""

    id: str
    row: Row
    text: str
    ids: list[int]
    choices: tuple[tuple[list[int], int], ...] = ()
    options: Options | None = None

    @property
    def hash(self) -> str:
        return hashed(self.text)


def chosen_rows(data: TaskData, limit: int | None, seed: int) -> list[tuple[str, Row]]:
    """Rows with their ids; with a limit that many, drawn at random, in their own order."""
    named = list(zip(row_ids(data.test), data.test, strict=True))
    if limit is None or limit >= len(named):
        return named
    kept = sorted(random.Random(seed).sample(range(len(named)), limit))
    return [named[place] for place in kept]


def prompts(tokenizer: Any, data: TaskData, rows: Sequence[tuple[str, Row]]) -> list[Question]:
    """To be answered in words; by way of the chat template where there is one."""
    made = []
    for name, row in rows:
        text = data.task.kind.prompt(row)
        hashed_text = json.dumps([text, row.get("answer")])
        made.append(Question(name, row, hashed_text, prompt_ids(tokenizer, text)))
    return made


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return _read(tokenizer, text)


def _read(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that goes on: without the end that some tokenizers put behind it."""
    ids = list(tokenizer(text)["input_ids"])
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids


def choices(tokenizer: Any, data: TaskData, rows: Sequence[tuple[str, Row]]) -> list[Question]:
    """To be answered by the likeliest choice."""
    made = []
    for name, row in rows:
        options = data.task.kind.options(row)
        found = choice_ids(tokenizer, options)
        if found is None:
            raise TaskDataError(
                f"Row {name} of {data.task.name} has a choice of no tokens, or none before them."
            )
        text = json.dumps([options.context, options.continuations, options.answer])
        made.append(Question(name, row, text, *found, options))
    return made


def choice_ids(
    tokenizer: Any, options: Options
) -> tuple[list[int], tuple[tuple[list[int], int], ...]] | None:
    """A question's `ids` and `choices`. A choice is tokenised behind its context, as it would be
    read; what all of them begin with is read once. None: there is nothing to read, or to choose."""
    before = len(_read(tokenizer, options.context))
    whole = [_read(tokenizer, options.context + text) for text in options.continuations]
    shared = min(_shared(whole), before)
    if shared < 1 or any(len(ids) <= before for ids in whole):
        return None
    return whole[0][:shared], tuple((ids[shared:], before - shared) for ids in whole)


def _shared(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all begin with."""
    count = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count


def windows(
    tokenizer: Any, rows: Sequence[tuple[str, Row]], length: int, limit: int | None, seed: int
) -> list[Question]:
    """All texts one after the other, cut into windows of `length` tokens; what is left is left.
    With a limit that many, drawn at random, in their own order."""
    ids = [token for _, row in rows for token in tokenizer(row["text"])["input_ids"]]
    count = len(ids) // length
    if not count:
        raise TaskDataError(f"There are {len(ids)} tokens of text, and a window has {length}.")
    places = random.Random(seed).sample(range(count), min(count, limit or count))
    cut = ((place, ids[place * length : (place + 1) * length]) for place in sorted(places))
    return [Question(f"window-{place}", {}, " ".join(map(str, part)), part) for place, part in cut]


def batches(questions: Sequence[Question], size: int, *, one_length: bool) -> list[list[int]]:
    """Places of questions, by length, at most `size` together; `one_length`: all of one length."""
    order = sorted(range(len(questions)), key=lambda place: (len(questions[place].ids), place))
    made: list[list[int]] = []
    for place in order:
        length = len(questions[place].ids)
        fits = made and len(made[-1]) < size
        if not fits or (one_length and len(questions[made[-1][0]].ids) != length):
            made.append([])
        made[-1].append(place)
    return made


def choice_tensors(batch: Sequence[Question]) -> tuple[Tensor, Tensor, Tensor]:
    """Contexts [B, C], options [B, A, N] and what of them is scored [B, A, N] bool, padded."""
    most = max(len(question.choices) for question in batch)
    longest = max(len(ids) for question in batch for ids, _ in question.choices)
    options = torch.zeros(len(batch), most, longest, dtype=torch.long)
    scored = torch.zeros(options.shape, dtype=torch.bool)
    for row, question in enumerate(batch):
        for column, (ids, skipped) in enumerate(question.choices):
            options[row, column, : len(ids)] = torch.tensor(ids)
            scored[row, column, skipped : len(ids)] = True
    return torch.tensor([question.ids for question in batch]), options, scored
