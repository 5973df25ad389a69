"""Likelihoods against the plain way: one whole text at a time, in float64."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conftest import BUILD, TEXTS, family
from helpers.families import FAMILIES, Family
from knn_moe import RoutingConfig, RoutingMemory, attach, build_memory
from knn_moe.errors import ConfigError
from knn_moe.tasks import likelihood
from knn_moe.tasks.likelihood import continuation_scores, token_losses

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

three_families = pytest.mark.parametrize("name", ["olmoe", "qwen3_moe", "gpt_oss"])


def some_ids(*shape: int) -> Tensor:
    return torch.randint(3, 128, shape)


def small(name: str) -> PreTrainedModel:
    """A family of the zoo, its sliding windows shorter than the texts here."""
    model = family(name)
    if name != "gpt_oss":
        return model
    model.config.sliding_window = 4
    narrow = type(model)(model.config).eval()
    narrow.load_state_dict(model.state_dict())
    return narrow


def memory_on(model: PreTrainedModel, attached: bool, tokenizer: object) -> Any:
    """A context that yields the handle of an attached memory, or nothing."""
    if not attached:
        return nullcontext()
    memory = build_memory(model, tokenizer, TEXTS, BUILD)
    handle: AbstractContextManager[Any] = attach(model, memory, RoutingConfig(k=2))
    return handle


@torch.no_grad()
def plain_scores(model: nn.Module, contexts: Tensor, continuations: Tensor) -> Tensor:
    rows, choices, _ = continuations.shape
    scores = torch.empty(rows, choices)
    for row in range(rows):
        for choice in range(choices):
            text = torch.cat([contexts[row], continuations[row, choice]])
            log = model(text[None], use_cache=False).logits[0].double().log_softmax(dim=-1)
            places = range(contexts.shape[1], len(text))
            scores[row, choice] = sum(log[place - 1, text[place]] for place in places)
    return scores


@three_families
@pytest.mark.parametrize("attached", [False, True])
def test_token_losses(name: str, attached: bool, tokenizer: object) -> None:
    model, windows = small(name), some_ids(5, 11)
    seen: list[int] = []
    with memory_on(model, attached, tokenizer) as routing:
        losses = token_losses(model, windows, 2, seen.append)
        if routing is not None:
            assert {layer.tokens for layer in routing.stats().values()} == {55}
        with torch.no_grad():
            for row, ids in enumerate(windows):
                theirs = model(ids[None], labels=ids[None], use_cache=False)
                assert float(losses.nll[row].mean()) == pytest.approx(float(theirs.loss), abs=1e-4)
                log = theirs.logits[0, :-1].double().log_softmax(dim=-1)
                by_hand = torch.stack([-log[place, ids[place + 1]] for place in range(10)])
                torch.testing.assert_close(losses.nll[row], by_hand.float(), **CLOSE)
                assert torch.equal(losses.correct[row], log.argmax(dim=-1) == ids[1:])
    assert losses.nll.shape == losses.correct.shape == (5, 10)
    assert (losses.nll.dtype, losses.correct.dtype) == (torch.float32, torch.bool)
    assert not losses.nll.requires_grad
    assert seen == [2, 4, 5]


def test_a_guessed_token_is_correct(model: PreTrainedModel) -> None:
    ids = some_ids(2, 4)
    guess = model(ids, use_cache=False).logits[:, -1].argmax(dim=-1)
    losses = token_losses(model, torch.cat([ids, guess[:, None]], dim=1), 8)
    assert losses.correct[:, -1].all()
    assert not losses.correct.all()


def test_losses_are_in_fp32_whatever_the_model() -> None:
    model = family("olmoe").to(torch.bfloat16)
    windows = some_ids(3, 9)
    losses = token_losses(model, windows, 3)
    with torch.no_grad():
        logits = model(windows, use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    log = logits[:, :-1].double().log_softmax(dim=-1)
    expected = -log.gather(2, windows[:, 1:, None])[..., 0]
    assert losses.nll.dtype == torch.float32
    torch.testing.assert_close(losses.nll, expected.float(), rtol=1e-5, atol=1e-5)


@three_families
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("length", [1, 5])
def test_continuations(name: str, attached: bool, length: int, tokenizer: object) -> None:
    model = small(name)
    contexts, continuations = some_ids(5, 11), some_ids(5, 3, length)
    seen: list[int] = []
    with memory_on(model, attached, tokenizer) as routing:
        scores = continuation_scores(model, contexts, continuations, 2, seen.append)
        if routing is not None:
            # Each context once, each continuation once.
            counted = {(layer.tokens, layer.calls) for layer in routing.stats().values()}
            assert counted == {(5 * (11 + 3 * length), 2 * 3)}
        torch.testing.assert_close(scores, plain_scores(model, contexts, continuations), **CLOSE)
    assert scores.shape == (5, 3)
    assert scores.dtype == torch.float32
    assert seen == [2, 4, 5]


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_contexts_shorter_and_longer_than_a_sliding_window(length: int) -> None:
    model = small("gpt_oss")
    contexts, continuations = some_ids(2, length), some_ids(2, 3, 6)
    scores = continuation_scores(model, contexts, continuations, 2)
    torch.testing.assert_close(scores, plain_scores(model, contexts, continuations), **CLOSE)
    # The window matters here: the same weights see more without it.
    wide = plain_scores(family("gpt_oss"), contexts, continuations)
    assert (scores - wide).abs().max() > 1e-2


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.name)
def test_every_family(entry: Family) -> None:
    model = entry.build()
    contexts, continuations = some_ids(2, 7), some_ids(2, 2, 3)
    calls: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: calls.append(tuple(args[0].shape))
    )
    scores = continuation_scores(model, contexts, continuations, 1)
    if entry.name in HYBRID:  # finds out on the first batch, and does not ask again
        assert calls == [(1, 7), (2, 10), (2, 10)]
    else:
        assert calls == [(1, 7), (2, 3), (1, 7), (2, 3)]
    torch.testing.assert_close(scores, plain_scores(model, contexts, continuations), **CLOSE)


@three_families
@pytest.mark.parametrize("attached", [False, True])
def test_reading_whole_is_the_same(
    name: str, attached: bool, tokenizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(name)
    contexts, continuations = some_ids(3, 9), some_ids(3, 4, 4)
    with memory_on(model, attached, tokenizer):
        shared = continuation_scores(model, contexts, continuations, 2)
        monkeypatch.setattr(likelihood, "_REPEATABLE", ())
        whole = continuation_scores(model, contexts, continuations, 2)
    torch.testing.assert_close(whole, shared, **CLOSE)


class WithoutKeeping(nn.Module):
    """A model whose forward returns every logit, always."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, input_ids: Tensor, use_cache: bool, past_key_values: Any = None) -> Any:
        return self.model(input_ids, use_cache=use_cache, past_key_values=past_key_values)


def test_a_model_that_cannot_keep_the_last_logit_only(model: PreTrainedModel) -> None:
    contexts, continuations = some_ids(2, 6), some_ids(2, 3, 4)
    kept: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: kept.append(args[0].shape[1]))
    expected = continuation_scores(model, contexts, continuations, 2)
    assert kept == [1, 4]
    scores = continuation_scores(WithoutKeeping(model), contexts, continuations, 2)
    assert kept == [1, 4, 6, 4]
    torch.testing.assert_close(scores, expected, **CLOSE)


def test_a_memory_changes_the_scores(model: PreTrainedModel, memory: RoutingMemory) -> None:
    contexts, continuations = some_ids(2, 6), some_ids(2, 3, 4)
    windows = some_ids(3, 8)
    base = continuation_scores(model, contexts, continuations, 2), token_losses(model, windows, 2)
    with attach(model, memory):
        assert (continuation_scores(model, contexts, continuations, 2) - base[0]).abs().max() > 1e-2
        assert (token_losses(model, windows, 2).nll - base[1].nll).abs().max() > 1e-2
    assert torch.equal(continuation_scores(model, contexts, continuations, 2), base[0])


def test_nothing_to_score(model: PreTrainedModel) -> None:
    assert token_losses(model, some_ids(0, 5), 4).nll.shape == (0, 4)
    assert continuation_scores(model, some_ids(0, 5), some_ids(0, 2, 3), 4).shape == (0, 2)


def test_shapes_that_do_not_fit_are_told(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"got \[5\]"):
        token_losses(model, some_ids(5), 2)
    with pytest.raises(ConfigError, match=r"got \[5, 1\]"):
        token_losses(model, some_ids(5, 1), 2)
    with pytest.raises(ConfigError, match="batch_size"):
        token_losses(model, some_ids(5, 3), 0)
    for contexts, continuations in (
        ((2, 6), (3, 2, 4)),
        ((2, 6), (2, 4)),
        ((2, 0), (2, 2, 4)),
        ((2, 6), (2, 0, 4)),
        ((2, 6), (2, 2, 0)),
    ):
        with pytest.raises(ConfigError, match="contexts"):
            continuation_scores(model, some_ids(*contexts), some_ids(*continuations), 2)


@pytest.mark.parametrize("kept", [True, False], ids=["context read once", "read whole"])
@three_families
def test_choices_of_any_length(name: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option's scored tokens alone, one option at a time, without padding."""
    if not kept:
        monkeypatch.setattr(likelihood, "_repeatable", lambda cache: False)
    network = small(name)
    contexts, options = torch.randint(3, 128, (3, 7)), torch.randint(3, 128, (3, 4, 9))
    lengths = torch.tensor([[1, 2, 3, 9], [1, 1, 1, 1], [8, 5, 4, 2]])
    skipped = torch.tensor([[0, 1, 0, 3], [0, 0, 0, 0], [0, 0, 2, 0]])
    places = torch.arange(9)
    scored = (places < lengths[:, :, None]) & (places >= skipped[:, :, None])
    scores, own = likelihood.choice_scores(network, contexts, options, scored)
    for row, column in itertools.product(range(3), range(4)):
        length, first = int(lengths[row, column]), int(skipped[row, column])
        ids = torch.cat([contexts[row], options[row, column, :length]])[None]
        with torch.no_grad():
            chances = network(ids, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
        likely = chances.gather(1, ids[0, 1:, None]).squeeze(1)
        assert scores[row, column].item() == pytest.approx(
            likely[6 + first :].sum().item(), abs=1e-4
        )
        assert own[row].item() == pytest.approx(-likely[:6].mean().item(), abs=1e-4)


def test_mean_losses_of_texts_of_any_length() -> None:
    network = family("olmoe")
    texts = [torch.randint(3, 128, (length,)).tolist() for length in (5, 2, 1, 9)]
    found = likelihood.mean_losses(network, texts)
    assert found[2].isnan()
    for text, loss in zip(texts, found.tolist(), strict=True):
        if len(text) > 1:
            ids = torch.tensor([text])
            with torch.no_grad():
                assert loss == pytest.approx(network(ids, labels=ids).loss.item(), abs=1e-4)
