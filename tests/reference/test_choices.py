"""Questions with distractors: whole questions in a batch, scored as evaluation scores them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.tuned import quiz_context
from knn_moe.adapt.calibrate.objective import find_temperature, line_losses
from knn_moe.build.build import choice_tokens, reference_tokens
from knn_moe.config import BuildConfig
from knn_moe.errors import ReferenceSetError
from knn_moe.reference.choices import ChoiceBatch, ChoiceTokens
from knn_moe.reference.examples import Example, tokenise
from knn_moe.reference.load import load_examples
from knn_moe.tasks.answers import by_likelihood
from knn_moe.tasks.questions import make_choices

COMPLETION = BuildConfig(loss="completion")


def read_quiz(model: Any, tokenizer: Any) -> tuple[list[Example], ChoiceTokens]:
    examples = quiz_context(model, tokenizer).examples
    found = choice_tokens(model, tokenizer, examples, BuildConfig())
    assert isinstance(found, ChoiceTokens)
    return examples, found


def test_a_batch_holds_all_choices_of_its_questions(tiny_olmoe: Any, tiny_tokenizer: Any) -> None:
    examples, reference = read_quiz(tiny_olmoe, tiny_tokenizer)
    seen = []
    for batch in reference.batches(64):
        assert isinstance(batch, ChoiceBatch)
        assert len(batch.ids) == 3 * len(batch.lines)
        assert batch.ids.numel() <= 64 or len(batch.lines) == 1
        assert batch.counts.tolist() == [1] * len(batch.lines) + [0] * 2 * len(batch.lines)
        for lines in batch.lines.tolist():
            assert len({int(batch.owner[line]) for line in lines}) == 1
            found = [batch.ids[line][batch.real[line]].tolist() for line in lines]
            asked = [int(batch.scored[line].sum()) for line in lines]
            number = next(
                n for n, e in enumerate(examples) if tokenise(e, tiny_tokenizer).ids == found[0]
            )
            seen.append(number)
            texts = [examples[number].completion, *examples[number].distractors]
            for text, ids, scored in zip(texts, found, asked, strict=True):
                tokens = tokenise(Example(examples[number].prompt, text), tiny_tokenizer)
                assert ids == tokens.ids
                assert scored == len(ids) - tokens.completion_start
    assert sorted(seen) == list(range(len(examples)))


def test_owners_and_cases_are_those_of_the_right_answers(
    tiny_olmoe: Any, tiny_tokenizer: Any
) -> None:
    """So a distractor's token recalls every example but its own."""
    examples, reference = read_quiz(tiny_olmoe, tiny_tokenizer)
    plain = reference_tokens(tiny_olmoe, tiny_tokenizer, examples, COMPLETION)
    assert torch.equal(reference.owners, plain.owners)
    assert torch.equal(reference.kept, plain.kept)
    assert torch.equal(reference.scored, plain.scored)
    batch = next(reference.batches(1 << 20))
    assert int(batch.kept.sum()) == len(plain.provenance)


def test_the_loss_of_a_choice_is_by_the_scores_of_evaluation(
    tiny_olmoe: Any, tiny_tokenizer: Any
) -> None:
    context = quiz_context(tiny_olmoe, tiny_tokenizer)
    rows = [(str(place), row) for place, row in enumerate(context.rows)]
    questions = make_choices(tiny_tokenizer, context.data, rows)
    expected = []
    for sample, (_, row) in zip(by_likelihood(tiny_olmoe)(questions, 0), rows, strict=True):
        characters = torch.tensor([float(len(choice)) for choice in row["choices"]])
        scores = torch.tensor(sample.likelihoods) / characters * characters.mean() / 4
        expected.append(float(-scores.log_softmax(dim=0)[row["answer"]]))
        assert sample.score == float(scores.argmax() == row["answer"])
    examples = context.examples
    reference = choice_tokens(tiny_olmoe, tiny_tokenizer, examples, BuildConfig())
    assert isinstance(reference, ChoiceTokens)
    object.__setattr__(reference, "temperature", 4.0)
    batch = reference.batch(list(range(len(examples))))
    with torch.no_grad():
        found = line_losses(tiny_olmoe, batch)
    torch.testing.assert_close(found[: len(examples)], torch.tensor(expected), atol=1e-3, rtol=1e-3)
    assert not found[len(examples) :].any()


def test_the_temperature_is_the_likeliest_one(tiny_olmoe: Any, tiny_tokenizer: Any) -> None:
    _, reference = read_quiz(tiny_olmoe, tiny_tokenizer)
    best = find_temperature(tiny_olmoe, reference.batches(4096))
    losses = {}
    for temperature in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        object.__setattr__(reference, "temperature", temperature)
        with torch.no_grad():
            found = [line_losses(tiny_olmoe, batch).sum() for batch in reference.batches(4096)]
        losses[temperature] = float(torch.stack(found).sum())
    assert best == min(losses, key=losses.__getitem__)


def test_examples_without_distractors_stay_as_they_are(
    tiny_olmoe: Any, tiny_tokenizer: Any
) -> None:
    examples = [Example("One and", " two"), Example("Red and", " blue")]
    reference = choice_tokens(tiny_olmoe, tiny_tokenizer, examples, BuildConfig())
    assert not isinstance(reference, ChoiceTokens)


@pytest.mark.parametrize(
    ("examples", "config", "message"),
    [
        (
            [Example("a", " b", distractors=(" c",)), Example("d", " e")],
            BuildConfig(),
            "Example 1 has no distractors, but others have some",
        ),
        (
            [Example("a b c d e f", " g", distractors=(" h",))],
            BuildConfig(max_length=4),
            "Example 0 has more than 4 tokens",
        ),
        (
            [Example("a b", " c", distractors=(" h i j k l m n o p",))],
            BuildConfig(max_length=6),
            "Example 0 has more than 6 tokens",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(
    examples: list[Example], config: BuildConfig, message: str, tiny_olmoe: Any, tiny_tokenizer: Any
) -> None:
    with pytest.raises(ReferenceSetError, match=message):
        choice_tokens(tiny_olmoe, tiny_tokenizer, examples, config)


def test_distractors_are_read_from_mappings() -> None:
    row = {"prompt": "2 + 2 =", "completion": " 4", "distractors": [" 3", " 5"]}
    assert load_examples([row]) == [Example("2 + 2 =", " 4", distractors=(" 3", " 5"))]
    for wrong in (" 3", [3], [" 4"], [""]):
        with pytest.raises(ReferenceSetError, match=r"Example 0: .*distractors"):
            load_examples([{**row, "distractors": wrong}])
