"""A task's rows as token ids, in batches: the same for every method that is compared.

A batch has questions of about the same length, so that there is little padding. Batches depend on
the rows, the tokenizer and the size of batches only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from knn_moe.errors import TaskDataError
from knn_moe.tasks.data import TaskData, draw, row_ids
from knn_moe.tasks.sample import Asked, short_hash
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, Kind, Options, Row

# The tokens that all choices share, then those of each choice and how many are of the context.
EncodedChoices: TypeAlias = tuple[list[int], tuple[tuple[list[int], int], ...]]
_ENCODED: Final = 1000  # questions that are tokenised at a time


@dataclass(frozen=True)
class Question:
    """A row and the tokens of it that a model reads."""

    id: str
    row: Row
    text: str  # everything that is asked, and the answer: it identifies the question
    ids: list[int]  # of the prompt, of the context before the choices, or of a window of text
    # For each choice its tokens, and how many of the first of them still belong to the context.
    choices: tuple[tuple[list[int], int], ...] = ()
    options: Options | None = None

    @property
    def hash(self) -> str:
        return short_hash(self.text)


def draw_rows(data: TaskData, limit: int | None, seed: int) -> list[tuple[str, Row]]:
    """Return test rows with their ids, in their order; with a limit, that many drawn at random."""
    return draw(list(zip(row_ids(data.test), data.test, strict=True)), limit, seed)


def make_prompts(tokenizer: Any, data: TaskData, rows: Sequence[tuple[str, Row]]) -> list[Question]:
    """Return questions to be answered by generation."""
    questions = []
    for name, row in rows:
        prompt = data.task.kind.prompt(row)
        text = json.dumps([prompt, row.get("answer")])
        questions.append(Question(name, row, text, encode_prompt(tokenizer, prompt)))
    return questions


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether prompts become chat messages, which the model was trained to answer."""
    return bool(getattr(tokenizer, "chat_template", None))


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, through the chat template if the tokenizer has one."""
    if has_chat_template(tokenizer):
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return _encode(tokenizer, text)


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens without the end-of-text token that some tokenizers append."""
    return _encode_all(tokenizer, [text])[0]


def _encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each text; one call for many texts runs on all cores."""
    end = tokenizer.eos_token_id
    return [
        list(ids[:-1] if len(ids) > 1 and ids[-1] == end else ids)
        for ids in tokenizer(list(texts))["input_ids"]
    ]


def make_choices(tokenizer: Any, data: TaskData, rows: Sequence[tuple[str, Row]]) -> list[Question]:
    """Return questions to be answered by the likeliest choice.

    Raises:
        TaskDataError: A context or a choice has no tokens.
    """
    questions = []
    asked = [data.task.kind.options(row) for _, row in rows]
    found = encode_choices(tokenizer, asked)
    for (name, row), options, encoded in zip(rows, asked, found, strict=True):
        if encoded is None:
            raise TaskDataError(
                f"Row {name} of {data.task.name} has a choice or a context without tokens."
            )
        text = json.dumps([options.context, options.continuations, options.answer])
        questions.append(Question(name, row, text, *encoded, options))
    return questions


def encode_choices(tokenizer: Any, asked: Sequence[Options]) -> list[EncodedChoices | None]:
    """Return the `ids` and `choices` of each question, None where one of them has no tokens.

    A choice is tokenised together with its context, and the tokens that all choices begin with
    are read once.
    """
    found: list[EncodedChoices | None] = []
    for start in range(0, len(asked), _ENCODED):
        part = asked[start : start + _ENCODED]
        texts = [each.context + text for each in part for text in ("", *each.continuations)]
        encoded = iter(_encode_all(tokenizer, texts))
        for each in part:
            length = len(next(encoded))
            found.append(_share_beginning(length, [next(encoded) for _ in each.continuations]))
    return found


def _share_beginning(length: int, whole: Sequence[list[int]]) -> EncodedChoices | None:
    """Take the tokens that all choices begin with, at most `length`, out of each of them."""
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*whole, strict=False))
    shared = min(len(list(alike)), length)
    if shared < 1 or any(len(ids) <= length for ids in whole):
        return None
    return whole[0][:shared], tuple((ids[shared:], length - shared) for ids in whole)


def make_windows(
    tokenizer: Any, rows: Sequence[tuple[str, Row]], length: int, limit: int | None, seed: int
) -> list[Question]:
    """Concatenate the texts and cut them into windows of `length` tokens; a rest is dropped.

    With a limit, that many windows are drawn at random and kept in their order.

    Raises:
        TaskDataError: There is not a single window.
    """
    ids = [token for _, row in rows for token in tokenizer(row["text"])["input_ids"]]
    count = len(ids) // length
    if not count:
        raise TaskDataError(
            f"The texts have {len(ids)} tokens, fewer than a window of {length}. Use more text, or "
            f"a smaller length."
        )
    places = draw(range(count), limit, seed)
    cut = ((place, ids[place * length : (place + 1) * length]) for place in places)
    return [Question(f"window-{place}", {}, " ".join(map(str, part)), part) for place, part in cut]


def say_what_is_asked(
    tokenizer: Any, kind: Kind, scoring: str, questions: Sequence[Question]
) -> list[Asked]:
    """Return each question as a reader wants to see it: without chat template and shots."""
    if scoring == GENERATION:
        return [Asked(question.id, kind.prompt(question.row)) for question in questions]
    if scoring == LIKELIHOOD:
        asked = [(question.id, kind.options(question.row)) for question in questions]
        return [Asked(name, options.context, options.continuations) for name, options in asked]
    return [Asked(question.id, str(tokenizer.decode(question.ids))) for question in questions]


def batch_by_tokens(
    questions: Sequence[Question], most: int, new_tokens: int = 0
) -> list[list[int]]:
    """Return batches of indices of questions, sorted by length, of at most `most` tokens each.

    All contexts of a batch count as long as its longest. A question of more tokens is a batch.

    Args:
        most: The most tokens in a batch.
        new_tokens: Tokens that will be generated after each question.
    """
    order = sorted(range(len(questions)), key=lambda place: (len(questions[place].ids), place))
    batches: list[list[int]] = []
    choices = 0  # tokens of the choices of the last batch
    for place in order:
        question = questions[place]
        more = sum(len(ids) for ids, _ in question.choices)
        length = len(question.ids) + new_tokens
        if not batches or length * (len(batches[-1]) + 1) + choices + more > most:
            batches.append([])
            choices = 0
        batches[-1].append(place)
        choices += more
    return batches


def batch_by_length(
    questions: Sequence[Question], size: int, *, one_length: bool
) -> list[list[int]]:
    """Return batches of at most `size` indices of questions, sorted by length.

    Args:
        size: The most questions in a batch.
        one_length: Whether all questions of a batch must have the same length.
    """
    order = sorted(range(len(questions)), key=lambda place: (len(questions[place].ids), place))
    batches: list[list[int]] = []
    for place in order:
        full = not batches or len(batches[-1]) == size
        if full or (one_length and len(questions[batches[-1][0]].ids) != len(questions[place].ids)):
            batches.append([])
        batches[-1].append(place)
    return batches


def pad_choices(
    batch: Sequence[Question],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the contexts, the choices, which of their tokens are scored, and where contexts begin.

    Contexts are padded on the left and choices on the right. Shapes: contexts [B, C]; choices
    [B, A, N]; scored [B, A, N] bool; begin [B], None if all contexts have the same length.
    """
    most = max(len(question.choices) for question in batch)
    longest = max(len(ids) for question in batch for ids, _ in question.choices)
    choices = torch.zeros(len(batch), most, longest, dtype=torch.long)
    scored = torch.zeros(choices.shape, dtype=torch.bool)
    for row, question in enumerate(batch):
        for column, (ids, skipped) in enumerate(question.choices):
            choices[row, column, : len(ids)] = torch.tensor(ids)
            scored[row, column, skipped : len(ids)] = True
    width = max(len(question.ids) for question in batch)
    begin = torch.tensor([width - len(question.ids) for question in batch])
    contexts = torch.tensor([[*[0] * (width - len(x.ids)), *x.ids] for x in batch])
    return contexts, choices, scored, begin if begin.any() else None
