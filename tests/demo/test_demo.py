"""The demo: its measures against the same by hand, and a whole small run of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from knn_moe import RoutingMemory, attach
from knn_moe.demo.demo import CONTROL, PAPER, STRONG, Demo, DemoConfig
from knn_moe.demo.measure import Measured, expert_use, measure_alone, measure_with, score, terciles
from knn_moe.demo.texts import (
    DemoText,
    TestSet,
    documentation,
    make_test_set,
    sample_reference,
)
from knn_moe.reference.examples import tokenise
from knn_moe.support.embedded_models import embedded_model
from knn_moe.support.statistics import paired_bootstrap
from knn_moe.tasks.likelihood import TokenLosses, token_losses

CONFIG = DemoConfig(length=128, reference_tokens=6000, windows=7, choices=8)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    place = embedded_model("tiny-olmoe")
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model("tiny-olmoe"))


@pytest.fixture(scope="module")
def text() -> DemoText:
    return documentation()


@pytest.fixture(scope="module")
def test_set(text: DemoText, tokenizer: Any) -> TestSet:
    return make_test_set(text.test, tokenizer, CONFIG.length, CONFIG.windows, CONFIG.choices)


@pytest.fixture(scope="module")
def demo(
    model: PreTrainedModel,
    tokenizer: Any,
    text: DemoText,
    tmp_path_factory: pytest.TempPathFactory,
) -> Any:
    """A demo that has run: its result, its folder, and what it reported on the way."""
    folder = tmp_path_factory.mktemp("demo")
    reports: list[tuple[float, str]] = []

    def report(share: float, stage: str) -> None:
        reports.append((share, stage))

    result = Demo(model, tokenizer, text, CONFIG, report).run(folder)
    strong = RoutingMemory.from_pretrained(folder / "strong")
    return SimpleNamespace(result=result, folder=folder, reports=reports, strong=strong)


# The measures.


def test_the_model_alone_is_scored_as_by_hand(model: PreTrainedModel, test_set: TestSet) -> None:
    shares: list[float] = []
    alone = measure_alone(model, test_set, shares.append)
    row = score(alone, alone)
    with torch.no_grad():
        losses = [float(model(w[None], labels=w[None]).loss) for w in test_set.windows]
        guesses = model(test_set.windows).logits[:, :-1].argmax(dim=-1)
    assert row.nll == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert row.perplexity == pytest.approx(math.exp(row.nll))
    right = (guesses == test_set.windows[:, 1:]).float().mean()
    assert row.accuracy == pytest.approx(float(right), abs=2e-3)
    chosen = [by_hand(model, test_set, item) for item in range(len(test_set.contexts))]
    assert alone.chosen.tolist() == chosen
    assert row.choice == pytest.approx(sum(chosen) / len(chosen))
    assert (row.nll_change, row.accuracy_change, row.choice_change) == (None, None, None)
    assert (row.confidence, row.rerouted, row.control) == ((), (), False)
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == pytest.approx(1)


@torch.no_grad()
def by_hand(model: PreTrainedModel, test_set: TestSet, item: int) -> bool:
    """Whether the true continuation is the likeliest of the four."""
    scores = []
    for option in test_set.continuations[item]:
        ids = torch.cat([test_set.contexts[item], option])
        logits = model(ids[None]).logits[0, len(test_set.contexts[item]) - 1 : -1]
        scores.append(-float(F.cross_entropy(logits, option, reduction="sum")))
    return scores.index(max(scores)) == int(test_set.answers[item])


def test_experts_are_those_of_the_model_alone_and_of_the_model_with_its_memory(
    model: PreTrainedModel, test_set: TestSet, demo: Any
) -> None:
    alone = measure_alone(model, test_set, lambda share: None)
    routed = measure_with(model, demo.strong, test_set, "with", lambda share: None)
    use = expert_use(alone, routed)
    with attach(model, demo.strong):
        expected = choices(model, test_set.windows)
    for rows, counted in ((use.before, choices(model, test_set.windows)), (use.after, expected)):
        for row, shares in zip(rows, counted, strict=True):
            assert list(row) == pytest.approx(shares.tolist(), abs=5e-3)
            assert sum(row) == pytest.approx(4, abs=2e-3)
    assert all(one != two for one, two in zip(use.before, use.after, strict=True))
    assert demo.result.experts == use


@torch.no_grad()
def choices(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The share of tokens each expert is chosen for, by layer, from the recorded logits."""
    recorded = model(ids, output_router_logits=True).router_logits
    chosen = [logits.view(-1, 16).topk(4).indices.flatten() for logits in recorded]
    return [torch.bincount(part, minlength=16) / ids.numel() for part in chosen]


def measured(way: str, windows: int, seed: int) -> Measured:
    draw = torch.Generator().manual_seed(seed)
    nll = 3 * torch.rand(windows, 5, generator=draw)
    chosen = torch.rand(9, generator=draw) > 0.5
    return Measured(way, TokenLosses(nll, nll < 1), chosen, torch.zeros(2, 4))


def test_changes_are_paired_by_window_and_by_choice() -> None:
    alone, routed = measured("zero-shot", 7, 0), measured("with", 7, 1)
    row = score(routed, alone, control=True)
    assert row.control
    for change, one, two in (
        (row.nll_change, routed.losses.nll, alone.losses.nll),
        (row.accuracy_change, routed.losses.correct, alone.losses.correct),
    ):
        means = (part.float().mean(dim=1).numpy() for part in (one, two))
        assert change == paired_bootstrap(*means)
    chosen = (way.chosen.float().numpy() for way in (routed, alone))
    assert row.choice_change == paired_bootstrap(*chosen)


@pytest.mark.parametrize("windows", [3, 7, 48])
def test_terciles_part_the_windows_by_how_hard_they_are(windows: int) -> None:
    alone, routed = measured("zero-shot", windows, 0), measured("with", windows, 1)
    parts = terciles([alone, routed], alone)
    assert [part.name.split()[0] for part in parts] == ["easiest", "middle", "hardest"]
    by_window = alone.losses.nll.mean(dim=1)
    order = by_window.argsort().tolist()
    sizes = [windows // 3 + (place < windows % 3) for place in range(3)]
    for part, size in zip(parts, sizes, strict=True):
        rows, order = order[:size], order[size:]
        hardness = by_window[rows].exp()
        assert part.perplexity == pytest.approx((float(hardness[0]), float(hardness[-1])))
        for way in (alone, routed):
            assert part.nll[way.way] == pytest.approx(float(way.losses.nll[rows].mean()))
        assert part.change.keys() == {"with"}
        difference = part.nll["with"] - part.nll["zero-shot"]
        assert part.change["with"].difference == pytest.approx(difference, abs=1e-6)
    assert order == []
    edges = [edge for part in parts for edge in part.perplexity]
    assert edges == sorted(edges)


def test_fewer_windows_than_terciles() -> None:
    alone = measured("zero-shot", 2, 0)
    assert [part.name for part in terciles([alone], alone)] == ["easiest third", "middle third"]


# A whole run.


def test_progress_goes_from_nothing_to_everything(demo: Any) -> None:
    shares = [share for share, _ in demo.reports]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == pytest.approx(1)
    stages = list(dict.fromkeys(stage for _, stage in demo.reports))
    assert len(stages) == 7
    assert stages == sorted(stages, key=[stage for _, stage in demo.reports].index)


def test_the_memories_are_left_in_the_folder(demo: Any, tokenizer: Any, text: DemoText) -> None:
    assert sorted(path.name for path in demo.folder.iterdir()) == ["paper", "strong"]
    sample = sample_reference(text.reference, tokenizer, CONFIG.reference_tokens)
    tokens = sum(len(tokenise(piece, tokenizer).ids) for piece in sample)
    for facts, preset, way in zip(
        demo.result.memories, ("paper", "strong"), (PAPER, STRONG), strict=True
    ):
        memory = RoutingMemory.from_pretrained(demo.folder / preset)
        assert (facts.way, facts.folder) == (way, preset)
        assert facts.cases == len(memory) == demo.result.reference_tokens == tokens
        assert facts.bytes == memory.nbytes
        assert memory.build.preset == preset
        assert memory.base_model.name == "tiny-olmoe"
        assert f"S = {memory.build.steps}, η = {memory.build.learning_rate:g}" in facts.settings
        assert f"K = {memory.routing.k}" in facts.settings


def test_a_result_says_what_was_tried(demo: Any, text: DemoText) -> None:
    result = demo.result
    assert result.model == "tiny-olmoe"
    assert (result.reference, result.test) == (text.reference_name, text.test_name)
    assert (result.test_tokens, result.test_windows, result.choices) == (7 * 128, 7, 8)
    assert (result.layers, result.top_k) == (tuple(range(6)), 4)
    assert [row.way for row in result.scores] == ["zero-shot", PAPER, STRONG, CONTROL]
    assert [row.control for row in result.scores] == [False, False, False, True]
    for row in result.scores[1:]:
        assert len(row.confidence) == len(row.rerouted) == 6
        assert all(0 < share <= 1 for share in row.confidence)
        assert row.nll_change.difference == pytest.approx(row.nll - result.scores[0].nll, abs=1e-5)
    assert json.loads(json.dumps(asdict(result)))["model"] == "tiny-olmoe"


def test_the_scores_are_those_of_the_saved_memories(
    demo: Any, model: PreTrainedModel, test_set: TestSet
) -> None:
    for preset, row in zip(("paper", "strong"), demo.result.scores[1:3], strict=True):
        with attach(model, RoutingMemory.from_pretrained(demo.folder / preset)):
            again = token_losses(model, test_set.windows, 8)
        assert row.nll == pytest.approx(float(again.nll.mean()), abs=1e-5)


def test_the_strong_memory_beats_the_model_and_the_control(demo: Any) -> None:
    alone, _, strong, control = demo.result.scores
    assert strong.nll < alone.nll - 0.01
    assert strong.nll < control.nll - 0.01


def test_terciles_hold_every_way(demo: Any) -> None:
    ways = [row.way for row in demo.result.scores]
    assert len(demo.result.terciles) == 3
    for part in demo.result.terciles:
        assert list(part.nll) == ways
        assert list(part.change) == ways[1:]


def test_passages_are_windows_of_the_test_text(
    demo: Any, model: PreTrainedModel, tokenizer: Any, test_set: TestSet
) -> None:
    alone = token_losses(model, test_set.windows, 8).nll
    with attach(model, demo.strong):
        routed = token_losses(model, test_set.windows, 8).nll
    gains = (alone - routed).sum(dim=1)
    best, middle, worst = demo.result.passages
    assert best.gain == pytest.approx(float(gains.max()), abs=1e-3)
    assert middle.gain == pytest.approx(float(gains.median()), abs=1e-3)
    assert worst.gain == pytest.approx(float(gains.min()), abs=1e-3)
    texts = [[tokenizer.decode([token]) for token in row] for row in test_set.windows.tolist()]
    for passage in demo.result.passages:
        place = texts.index([token.text for token in passage.tokens])
        first, *others = passage.tokens
        assert (first.nll_before, first.nll_after, first.cases) == (None, None, ())
        before = torch.tensor([token.nll_before for token in others])
        after = torch.tensor([token.nll_after for token in others])
        torch.testing.assert_close(before, alone[place], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after, routed[place], rtol=1e-4, atol=1e-5)
        assert passage.gain == pytest.approx(float((before - after).sum()), abs=1e-4)


def test_what_is_recalled_was_in_the_reference(demo: Any, tokenizer: Any, text: DemoText) -> None:
    pieces = [
        piece.completion
        for piece in sample_reference(text.reference, tokenizer, CONFIG.reference_tokens)
    ]
    broken = 0
    for passage in demo.result.passages:
        for token in passage.tokens[1:]:
            assert [case.layer for case in token.cases] == list(range(6))
            for case in token.cases:
                shown = case.before + case.token + case.after
                if "\ufffd" in shown:  # a character cut in two
                    broken += 1
                    continue
                assert any(shown in piece for piece in pieces), shown
                assert 0 < case.confidence <= 1
                assert case.distance >= 0
                assert len(case.experts_in) == len(case.experts_out)
                assert not set(case.experts_in) & set(case.experts_out)
    assert broken < 0.1 * 3 * 127 * 6


def test_the_model_is_left_as_it_was(demo: Any, model: PreTrainedModel, test_set: TestSet) -> None:
    fresh = AutoModelForCausalLM.from_pretrained(
        embedded_model("tiny-olmoe"), dtype=torch.float32
    ).eval()
    assert demo.result.model == "tiny-olmoe"  # it has run
    with torch.no_grad():
        assert torch.equal(model(test_set.windows[:2]).logits, fresh(test_set.windows[:2]).logits)
