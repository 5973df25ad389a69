"""experiments/expert_balance.py: losses by domain, and how a model uses its experts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from corpus import load_validation_windows
from expert_balance import describe_expert_balance, divergence, expert_shares, losses_by_domain


@pytest.mark.slow
def test_losses_are_the_models_own(
    least_model: Any, small_tokenizer: Any, small_data: Path
) -> None:
    tokens = load_validation_windows(small_tokenizer, small_data, ("legal", "gsm8k"))
    for domain, found in losses_by_domain(least_model, tokens).items():
        ids = tokens[domain]
        assert ids.shape[1] == 256
        assert len(ids) >= 2
        assert found == pytest.approx(least_model(ids, labels=ids).loss.item(), abs=1e-4)


def test_expert_use_is_counted_from_the_router_logits(least_model: Any) -> None:
    ids = torch.randint(2, 300, (40, 12))
    logits = least_model(ids, output_router_logits=True).router_logits
    hooks = [len(module._forward_hooks) for module in least_model.modules()]
    found = expert_shares(least_model, ids)
    assert [len(module._forward_hooks) for module in least_model.modules()] == hooks
    for row, layer in zip(found, logits, strict=True):
        chosen = layer.reshape(-1, 4).topk(2).indices.flatten().tolist()
        expected = [chosen.count(expert) / len(chosen) for expert in range(4)]
        assert row.tolist() == pytest.approx(expected)


def test_the_balance_shows_the_busiest_and_the_least_busy_expert(least_model: Any) -> None:
    parts = {"low": torch.randint(2, 100, (4, 16)), "high": torch.randint(200, 300, (4, 16))}
    found = describe_expert_balance(least_model, parts)
    uses = {name: expert_shares(least_model, part) for name, part in parts.items()}
    mean = (uses["low"] + uses["high"]) / 2
    for place, row in enumerate(mean):
        assert found["load"][place] == pytest.approx(row.tolist(), abs=1e-4)
        assert found["busiest"][place] == pytest.approx(4 * float(row.max()), abs=0.01)
        assert found["idlest"][place] == pytest.approx(4 * float(row.min()), abs=0.01)
    apart = found["divergence"]
    assert apart["low"]["high"] == apart["high"]["low"] > 0
    assert apart["low"]["low"] == apart["high"]["high"] == 0


def test_divergence_is_from_none_to_one_bit() -> None:
    one = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
    other = torch.tensor([[0.0, 0.0, 0.2, 0.8], [0.1, 0.2, 0.3, 0.4]])
    assert divergence(one, one) == 0
    assert divergence(one[:1], other[:1]) == pytest.approx(1)
    assert divergence(one, other) == pytest.approx(0.5)  # the mean over layers
    half = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
    by_hand = (math.log2(4 / 3) + 0.5 * math.log2(2 / 3) + 0.5 * math.log2(2)) / 2
    assert divergence(*half) == pytest.approx(by_hand)
