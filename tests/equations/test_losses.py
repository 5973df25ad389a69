"""The one next-token loss, against a plain loop in float64."""

from __future__ import annotations

import pytest
import torch

from knn_moe.equations import losses
from knn_moe.equations.losses import IGNORED, choice_losses, next_token_losses, target_losses


@pytest.mark.parametrize("numbers", [1 << 27, 1])
def test_it_is_a_plain_loop_s(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some sequences at a time give what all of them at once do."""
    monkeypatch.setattr(losses, "_NUMBERS", numbers)
    logits, ids = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    scored = torch.rand(3, 5) < 0.6
    found = next_token_losses(logits.bfloat16(), ids, scored)
    assert (found.dtype, found.shape) == (torch.float32, (3, 4))
    likelihood = logits.bfloat16().double().log_softmax(dim=-1)
    for row in range(3):
        for place in range(4):
            expected = -float(likelihood[row, place, ids[row, place + 1]])
            expected = expected if scored[row, place] else 0.0
            assert float(found[row, place]) == pytest.approx(expected, abs=1e-5)
    assert torch.equal(next_token_losses(logits, ids), target_losses(logits[:, :-1], ids[:, 1:]))


def test_ignored_targets_have_no_loss_and_no_gradient() -> None:
    logits = torch.randn(1, 3, 4, requires_grad=True)
    found = target_losses(logits, torch.tensor([[1, IGNORED, 2]]))
    assert found[0, 1] == 0
    found.sum().backward()
    assert logits.grad is not None
    assert not logits.grad[0, 1].any()
    assert logits.grad[0, 0].any()


def test_a_sequence_of_one_token_has_no_next_one() -> None:
    assert (
        next_token_losses(torch.randn(2, 1, 4), torch.zeros(2, 1, dtype=torch.int64)).numel() == 0
    )


def test_the_loss_of_a_choice_is_its_share_among_its_questions_choices() -> None:
    scores = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])
    lines = torch.tensor([[0, 2, 3], [1, 4, -1]])
    expected = [-scores[[0, 2, 3]].log_softmax(0)[0], -scores[[1, 4]].log_softmax(0)[0]]
    torch.testing.assert_close(choice_losses(scores, lines), torch.stack(expected))
