"""Likelihoods equal the plain computation: one whole text at a time, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from helpers.families import FAMILIES, Family
from helpers.near_ties import is_steady
from helpers.zoo import BUILD, TEXTS, family
from knn_moe import RoutingConfig, RoutingMemory, attach, build_memory
from knn_moe.errors import ConfigError
from knn_moe.tasks import likelihood
from knn_moe.tasks.likelihood import choice_scores, mean_losses, token_losses

CLOSE = {"rtol": 0, "atol": 1e-4}
HYBRID = {
    "qwen3_next",
    "jamba",
    "minimax",
    "lfm2_moe",
    "nemotron_h",
    "granitemoehybrid",
    "qwen3_5_moe_text",
}


def random_ids(*shape: int) -> Tensor:
    return torch.randint(3, 128, shape)


def with_short_window(name: str) -> PreTrainedModel:
    """Build a family; the sliding window of GPT-OSS becomes shorter than the texts here."""
    model = family(name)
    if name != "gpt_oss":
        return model
    model.config.sliding_window = 4
    narrow = type(model)(model.config).eval()
    narrow.load_state_dict(model.state_dict())
    return narrow


@torch.no_grad()
def plain_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the losses of one text, [T] → [T - 1]."""
    log = model(ids[None], use_cache=False).logits[0, :-1].double().log_softmax(dim=-1)
    return -log.gather(1, ids[1:, None]).squeeze(1)


def plain_scores(model: nn.Module, contexts: Tensor, choices: Tensor) -> Tensor:
    scores = torch.empty(choices.shape[:2])
    for row, column in itertools.product(*map(range, scores.shape)):
        losses = plain_losses(model, torch.cat([contexts[row], choices[row, column]]))
        scores[row, column] = -losses[contexts.shape[1] - 1 :].sum()
    return scores


@pytest.mark.parametrize(
    ("name", "attached"), [("olmoe", True), ("qwen3_moe", True), ("gpt_oss", False)]
)
def test_token_losses_equal_the_plain_ones(
    name: str, attached: bool, zoo_tokenizer: object
) -> None:
    model, windows = with_short_window(name), random_ids(5, 11)
    routing = None
    if attached:
        memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
        routing = attach(model, memory, RoutingConfig(k=2))
    losses = token_losses(model, windows, 2)
    if routing is not None:
        assert {layer.tokens for layer in routing.stats().values()} == {55}
    for row, ids in enumerate(windows):
        torch.testing.assert_close(losses.nll[row], plain_losses(model, ids).float(), **CLOSE)
        likeliest = model(ids[None], use_cache=False).logits[0, :-1].argmax(dim=-1)
        assert torch.equal(losses.correct[row], likeliest == ids[1:])
    assert losses.nll.shape == losses.correct.shape == (5, 10)
    assert (losses.nll.dtype, losses.correct.dtype) == (torch.float32, torch.bool)
    assert not losses.nll.requires_grad


def test_a_token_that_the_model_predicts_is_correct(zoo_olmoe: PreTrainedModel) -> None:
    ids = random_ids(2, 4)
    guess = zoo_olmoe(ids, use_cache=False).logits[:, -1].argmax(dim=-1)
    losses = token_losses(zoo_olmoe, torch.cat([ids, guess[:, None]], dim=1), 8)
    assert losses.correct[:, -1].all()
    assert not losses.correct.all()


def test_losses_of_a_bfloat16_model_are_in_fp32() -> None:
    model = family("olmoe").to(torch.bfloat16)
    windows = random_ids(3, 9)
    losses = token_losses(model, windows, 3)
    with torch.no_grad():
        logits = model(windows, use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    log = logits[:, :-1].double().log_softmax(dim=-1)
    expected = -log.gather(2, windows[:, 1:, None])[..., 0]
    assert losses.nll.dtype == torch.float32
    torch.testing.assert_close(losses.nll, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [3, 5])
def test_contexts_shorter_and_longer_than_a_sliding_window(length: int) -> None:
    model = with_short_window("gpt_oss")
    contexts, choices = random_ids(2, length), random_ids(2, 3, 6)
    scores, _ = choice_scores(model, contexts, choices, torch.ones(2, 3, 6, dtype=torch.bool))
    torch.testing.assert_close(scores, plain_scores(model, contexts, choices), **CLOSE)
    # The window matters here: the same weights see more without it.
    wide = plain_scores(family("gpt_oss"), contexts, choices)
    assert (scores - wide).abs().max() > 1e-2


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.name)
def test_a_context_is_read_once_unless_the_model_is_hybrid(entry: Family) -> None:
    model = entry.build()
    contexts, choices = random_ids(2, 7), random_ids(2, 2, 3)
    calls: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: calls.append(tuple(args[0].shape))
    )
    scores, _ = choice_scores(model, contexts, choices, torch.ones(2, 2, 3, dtype=torch.bool))
    assert calls == [(2, 7), (4, 10) if entry.name in HYBRID else (4, 2)]
    torch.testing.assert_close(scores, plain_scores(model, contexts, choices), **CLOSE)


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
def test_choices_of_any_length_equal_the_plain_ones(
    name: str, repeatable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not repeatable:
        monkeypatch.setattr(likelihood, "_REPEATABLE", ())
    model = with_short_window(name)
    contexts, choices = random_ids(3, 7), random_ids(3, 4, 9)
    lengths = torch.tensor([[1, 2, 3, 9], [1, 1, 1, 1], [8, 5, 4, 2]])
    skipped = torch.tensor([[0, 1, 0, 3], [0, 0, 0, 0], [0, 0, 2, 0]])
    places = torch.arange(9)
    scored = (places < lengths[:, :, None]) & (places >= skipped[:, :, None])
    scores, context_losses = choice_scores(model, contexts, choices, scored)
    for row, column in itertools.product(range(3), range(4)):
        text = torch.cat([contexts[row], choices[row, column, : lengths[row, column]]])
        losses = plain_losses(model, text)
        expected = -float(losses[6 + int(skipped[row, column]) :].sum())
        assert float(scores[row, column]) == pytest.approx(expected, abs=1e-4)
        assert float(context_losses[row]) == pytest.approx(float(losses[:6].mean()), abs=1e-4)


def test_a_memory_changes_the_scores_until_it_is_detached(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    contexts, choices = random_ids(2, 6), random_ids(2, 3, 4)
    scored, windows = torch.ones(2, 3, 4, dtype=torch.bool), random_ids(3, 8)
    base, _ = choice_scores(zoo_olmoe, contexts, choices, scored)
    losses = token_losses(zoo_olmoe, windows, 2).nll
    with attach(zoo_olmoe, zoo_memory):
        assert (choice_scores(zoo_olmoe, contexts, choices, scored)[0] - base).abs().max() > 1e-2
        assert (token_losses(zoo_olmoe, windows, 2).nll - losses).abs().max() > 1e-2
    assert torch.equal(choice_scores(zoo_olmoe, contexts, choices, scored)[0], base)


def test_windows_of_another_shape_are_refused(zoo_olmoe: PreTrainedModel) -> None:
    assert token_losses(zoo_olmoe, random_ids(0, 5), 4).nll.shape == (0, 4)
    with pytest.raises(ConfigError, match=r"got \[5\]"):
        token_losses(zoo_olmoe, random_ids(5), 2)
    with pytest.raises(ConfigError, match=r"got \[5, 1\]"):
        token_losses(zoo_olmoe, random_ids(5, 1), 2)
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        token_losses(zoo_olmoe, random_ids(5, 3), 0)


def test_mean_losses_of_texts_of_any_length(zoo_olmoe: PreTrainedModel) -> None:
    texts = [random_ids(length) for length in (5, 2, 1, 9)]
    ids = [text.tolist() for text in texts]
    means, late = mean_losses(zoo_olmoe, ids), mean_losses(zoo_olmoe, ids, begin=[3, 0, 1, 8])
    assert means[2].isnan()
    for place, first in ((0, 3), (1, 1), (3, 8)):
        losses = plain_losses(zoo_olmoe, texts[place])
        assert float(means[place]) == pytest.approx(float(losses.mean()), abs=1e-4)
        assert float(late[place]) == pytest.approx(float(losses[first - 1 :].mean()), abs=1e-4)


def pad_left(contexts: list[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(map(len, contexts))
    begin = torch.tensor([width - len(each) for each in contexts])
    return torch.stack([torch.nn.functional.pad(x, (width - len(x), 0)) for x in contexts]), begin


def draw_steady(model: PreTrainedModel) -> tuple[list[Tensor], Tensor]:
    """Draw contexts and choices at which no two experts are equally likely."""
    for _ in range(20):
        contexts, choices = [random_ids(length) for length in (3, 8, 5, 8)], random_ids(4, 3, 5)
        wholes = [
            torch.cat([context.expand(3, -1), part], dim=1)
            for context, part in zip(contexts, choices, strict=True)
        ]
        if all(is_steady(model, whole) for whole in wholes):
            return contexts, choices
    raise AssertionError("Every draw is near a tie.")


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.name)
def test_contexts_of_any_length_equal_the_plain_ones(entry: Family) -> None:
    """Side by side if the model's cache can be repeated, else length by length."""
    model = entry.build()
    contexts, choices = draw_steady(model)
    scored = torch.ones(choices.shape, dtype=torch.bool)
    scores, losses = choice_scores(model, *_ordered(contexts, choices, scored))
    bare, nothing = choice_scores(model, *_ordered(contexts, choices, scored), context_losses=False)
    torch.testing.assert_close(bare, scores, **CLOSE)
    assert nothing.isnan().all()
    for row, context in enumerate(contexts):
        expected = plain_scores(model, context[None], choices[row : row + 1])
        torch.testing.assert_close(scores[row], expected[0], **CLOSE)
        mean = float(plain_losses(model, context).mean())
        assert float(losses[row]) == pytest.approx(mean, abs=1e-4)


def _ordered(
    contexts: list[Tensor], choices: Tensor, scored: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    padded, begin = pad_left(contexts)
    return padded, choices, scored, begin


def test_padding_changes_neither_windows_nor_memories(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    contexts = [random_ids(length) for length in (2, 9, 6)]
    choices, scored = random_ids(3, 2, 4), torch.ones(3, 2, 4, dtype=torch.bool)
    model = with_short_window("gpt_oss")
    scores, _ = choice_scores(model, *_ordered(contexts, choices, scored))
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(k=2)):
        recalled, _ = choice_scores(
            zoo_olmoe, *_ordered(contexts, choices, scored), context_losses=False
        )
        for row, context in enumerate(contexts):
            parts = context[None], choices[row : row + 1]
            torch.testing.assert_close(scores[row], plain_scores(model, *parts)[0], **CLOSE)
            torch.testing.assert_close(recalled[row], plain_scores(zoo_olmoe, *parts)[0], **CLOSE)
