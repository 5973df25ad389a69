"""Tokens are drawn by each request's own temperature, top_p and seed."""

from __future__ import annotations

import pytest
import torch

from knn_moe.serve.sampling import Drawer, Sampling, draw_tokens

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0]).log_softmax(-1)


def draw(count: int, **options: float) -> list[int]:
    drawer = Drawer(Sampling(**{"seed": 1, **options}))
    return [draw_tokens([drawer], LOGITS[None])[0].id for _ in range(count)]


def test_shares_are_those_of_the_temperature() -> None:
    for temperature in (0.5, 1.0, 2.0):
        drawn = torch.tensor(draw(4000, temperature=temperature))
        shares = torch.bincount(drawn, minlength=4) / 4000
        expected = (LOGITS / temperature).softmax(-1)
        torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)


def test_the_most_likely_token() -> None:
    assert set(draw(50, temperature=0.0)) == {1}
    assert set(draw(50, temperature=1e-30)) == {1}
    assert set(draw(50, top_p=0.0)) == {1}


def test_top_p_keeps_the_fewest_that_have_the_share() -> None:
    assert set(draw(500, top_p=0.7)) == {1, 3}  # 0.61 and 0.22
    assert set(draw(500, top_p=0.9)) == {0, 1, 3}
    assert set(draw(2000, top_p=1.0)) == {0, 1, 2, 3}


def test_a_seed_gives_the_same_whoever_else_is_in_the_batch() -> None:
    alone = draw(20)
    assert draw(20) == alone != draw(20, seed=2)
    drawer, other = Drawer(Sampling(seed=1)), Drawer(Sampling(seed=5))
    rows = torch.stack([LOGITS.flip(0), LOGITS])
    assert [draw_tokens([other, drawer], rows)[1].id for _ in range(20)] == alone
    assert len({tuple(draw(20, seed=None)) for _ in range(3)}) > 1


def test_log_probabilities_are_those_before_the_temperature() -> None:
    rows = torch.stack([LOGITS + 3, LOGITS, LOGITS])
    drawers = [
        Drawer(Sampling(temperature=2.0, seed=1, logprobs=2)),
        None,
        Drawer(Sampling(temperature=0.0, logprobs=0)),
    ]
    first, second, third = draw_tokens(drawers, rows)
    assert first.logprob == pytest.approx(float(LOGITS[first.id]))
    assert [id for id, _ in first.top] == [1, 3]
    assert [value for _, value in first.top] == pytest.approx(LOGITS[[1, 3]].tolist())
    assert (second.logprob, second.top) == (None, ())
    assert (third.id, third.top) == (1, ())
    assert third.logprob == pytest.approx(float(LOGITS[1]))


def test_a_model_that_has_diverged_harms_nobody() -> None:
    rows = torch.stack([LOGITS * float("nan"), LOGITS])
    drawers = [Drawer(Sampling(seed=1, logprobs=1)), Drawer(Sampling(temperature=0.0))]
    first, second = draw_tokens(drawers, rows)
    assert 0 <= first.id < 4
    assert second.id == 1
