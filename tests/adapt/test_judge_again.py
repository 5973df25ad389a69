"""A second look: where one part is too small to be sure, all examples but those to choose by judge,
and none of them by what was learned from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import QUICK, mean_loss, sayings
from helpers.zoo import BUILD, VOCABULARY
from knn_moe import RoutingConfig, RoutingMemory, attach, build_memory, calibrate
from knn_moe.adapt.calibrate.fit import FitCases, FitData
from knn_moe.adapt.calibrate.judge import Judgement
from knn_moe.adapt.calibrate.search import Search
from knn_moe.adapt.calibrate.trials import Calibrator, Trial
from knn_moe.reference.splits import split
from knn_moe.support.progress import ignore_progress
from knn_moe.support.statistics import Comparison


def noisy_sayings(count: int) -> list[str]:
    """Make sayings in which every fourth word is a random one, so that less can be gained."""
    draw = random.Random(3)

    def misheard(word: str) -> str:
        return str(draw.randrange(3, VOCABULARY)) if draw.random() < 0.25 else word

    return [" ".join(map(misheard, text.split())) for text in sayings(count, seed=3)]


class Watched(Calibrator):
    """Notes the examples that it learns from again, and the judgement before."""

    learned: list[set[int]]

    def _learn_again(self, data: FitData, trial: Trial) -> tuple[RoutingConfig, Sequence[FitCases]]:
        owners = torch.cat([batch.owner for batch in data.batches])
        self.learned.append(set(owners.tolist()))
        return super()._learn_again(data, trial)


def watched(model: PreTrainedModel, memory: RoutingMemory) -> Watched:
    reference = memory.reference_tokens()
    calibrator = Watched(model, memory, reference, QUICK, ignore_progress)
    calibrator.learned = []
    return calibrator


@pytest.mark.slow
def test_no_example_is_judged_by_what_was_learned_from_it(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    calibrator = watched(olmoe, sayings_memory)
    search = Search(calibrator)
    search.begin()
    search.run()
    first, again = calibrator.judge(search.best), calibrator.judge_again(search.best)
    parts = [calibrator.splits.judged_fit, calibrator.splits.judge]
    judged = {owner for part in parts for owner in part.reference.owners[part.windows].tolist()}
    assert (again.looks, again.examples) == (2, len(judged))
    assert again.examples > first.examples
    halves = [set(half.reference.owners[half.windows].tolist()) for half in parts[0].halves()]
    assert not halves[0] & halves[1]
    everything = set(sayings_memory.reference_tokens().owners.tolist())
    assert calibrator.learned == [everything - half for half in halves]
    assert again.change.high - again.change.low < first.change.high - first.change.low
    assert set(again.mean_confidence) == set(first.mean_confidence)


@pytest.mark.slow
def test_a_gain_that_one_part_is_too_small_for_is_found(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Six examples judge at first, 30 at the second look; and unseen text does get likelier."""
    texts = noisy_sayings(136)
    memory = build_memory(
        olmoe, zoo_tokenizer, texts[:36], replace(BUILD, steps=5, learning_rate=20.0)
    )
    found = calibrate(olmoe, memory, config=QUICK)
    assert found.helps
    assert (found.judgement.looks, found.judgement.examples) == (2, 30)
    assert found.report()["looks"] == 2
    alone = mean_loss(olmoe, zoo_tokenizer, texts[36:])
    with attach(olmoe, found.apply(memory)):
        assert mean_loss(olmoe, zoo_tokenizer, texts[36:]) < alone


def test_a_second_look_needs_half_the_p_value() -> None:
    judgement = Judgement(3.0, 3.1, Comparison(-0.1, -0.19, -0.01, 0.03), 100, 1000, {})
    assert judgement.better
    assert not replace(judgement, looks=2).better
    surer = replace(judgement, change=Comparison(-0.1, -0.18, -0.02, 0.02), looks=2)
    assert surer.better


def test_halves_of_a_part(sayings_memory: RoutingMemory) -> None:
    part = split(sayings_memory.reference_tokens(), QUICK).fit
    first, second = part.halves()
    assert sorted(first.windows + second.windows) == sorted(part.windows)
    assert abs(len(first.windows) - len(second.windows)) <= 1
    assert part.without(first) == second
    assert part.without(second).windows == first.windows
