"""experiments/router_fit.py: rows that tell domains apart, and descriptions of routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.small_gguf import small_llama
from helpers.small_mixtures import FORMS
from knn_moe.routers.find import find_routers
from router_fit import describe_logits, domain_accuracy, fit_domain_rows
from upcycle import feed_forwards, mix

DOMAINS = ("fiction", "textbook", "legal", "python", "tinystories")


def draw_windows(seed: int) -> dict[str, Tensor]:
    """Draw text of five domains, each with ten tokens of its own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(10 * place, 10 * place + 10, (20, 32), generator=generator)
        for place, name in enumerate(DOMAINS)
    }


@pytest.fixture(scope="module")
def dense() -> Any:
    return small_llama()


@pytest.fixture(scope="module")
def rows(dense: Any) -> Tensor:
    return fit_domain_rows(dense, draw_windows(0))


def test_rows_tell_the_domains_of_other_text_apart(dense: Any, rows: Tensor) -> None:
    assert rows.shape == (2, 5, dense.config.hidden_size)
    torch.testing.assert_close(rows.sum(dim=1), torch.zeros(2, rows.shape[-1]), rtol=0, atol=1e-4)
    accuracy = domain_accuracy(dense, rows, draw_windows(1))
    assert list(accuracy) == list(DOMAINS)
    assert all(len(shares) == 2 and min(shares) > 0.4 for shares in accuracy.values())
    assert not any(layer.mlp._forward_pre_hooks for layer in dense.model.layers)


@torch.no_grad()
def test_logits_are_described_as_the_routers_compute_them(dense: Any, rows: Tensor) -> None:
    model = mix(dense, [feed_forwards(dense)] * 5, rows, FORMS["whole"])
    windows = draw_windows(0)
    inputs: list[list[Tensor]] = [[], []]
    for place, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(
            lambda module, args, place=place: inputs[place].append(args[0])
        )
    found = describe_logits(model, windows)
    for place, router in enumerate(find_routers(model)):
        logits = F.linear(torch.cat(inputs[place]).flatten(0, 1), router.weight)
        largest = logits.topk(3).values
        gap = (largest[:, 1] - largest[:, 2]).mean().item()
        assert found["spread"][place] == pytest.approx(logits.std(dim=-1).mean().item(), abs=1e-3)
        assert found["gap"][place] == pytest.approx(gap, abs=1e-3)
        # All copies are equal, so router inputs are the dense model's, with a spread of 1 over the
        # branches; the original's logit is their mean.
        assert logits[:, 1:].std(dim=-1).mean().item() == pytest.approx(1, abs=1e-3)
