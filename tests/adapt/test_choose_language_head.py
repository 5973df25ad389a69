"""The language-model head that calibration chooses: by some examples, kept if others gain."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import QUICK, mean_loss, open_cases, sayings
from helpers.commands import run_cli
from helpers.zoo import BUILD, make_texts
from knn_moe import HeadConfig, RoutingMemory, attach, build_memory, calibrate
from knn_moe.adapt.calibrate.judge import Baseline, Judgement
from knn_moe.adapt.calibrate.language_head import (
    HeadChoice,
    HeadReader,
    NextTokens,
    choose_head,
)
from knn_moe.adapt.calibrate.result import write_calibrated
from knn_moe.equations.next_token import KS
from knn_moe.memory.head_keys import HeadKeys
from knn_moe.reference.provenance import owners
from knn_moe.reference.splits import split
from knn_moe.support.statistics import Comparison


@pytest.mark.slow
def test_a_head_helps_on_unseen_text(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, sayings_memory: RoutingMemory
) -> None:
    chosen = calibrate(olmoe, sayings_memory, config=replace(QUICK, head=True))
    unseen = sayings(76)[40:]
    alone = mean_loss(olmoe, zoo_tokenizer, unseen)
    calibrated = chosen.apply(sayings_memory)
    with attach(olmoe, calibrated):
        both = mean_loss(olmoe, zoo_tokenizer, unseen)
    with attach(olmoe, calibrated, replace(calibrated.routing, head=None)):
        routed = mean_loss(olmoe, zoo_tokenizer, unseen)
    assert both < routed < alone
    head = chosen.head
    assert head is not None
    assert head.helps
    assert calibrated.routing.head == head.config
    # The gain on examples that had no part in the choice is about the gain here.
    assert both - alone == pytest.approx(head.change.difference, abs=0.3)
    assert both - routed == pytest.approx(head.added.difference, abs=0.3)
    assert chosen.report()["head"]["config"]["k"] in KS


@pytest.mark.slow
def test_hidden_states_are_those_of_the_model_as_it_will_be_used(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are trained on all examples after the head was chosen, which moves hidden states."""
    config = replace(BUILD, gradient="dense", steps=5, learning_rate=20.0)
    memory = build_memory(olmoe, zoo_tokenizer, sayings(40), config)
    gain = Comparison(difference=-1.0, low=-1.1, high=-0.9, p=0.001)
    head = HeadConfig(keys="hidden", k=16)
    sure = HeadChoice(head, change=gain, added=gain, examples=20)
    monkeypatch.setattr("knn_moe.adapt.calibrate.trials.choose_head", lambda *_, **__: sure)
    found = calibrate(olmoe, memory, config=replace(QUICK, neighbours=(4,), head=True))
    assert found.values_trained
    assert found.head is not None
    assert found.head.keys is not None
    after = replace(found.apply(memory), head_keys=None)
    routing = replace(found.routing, head=None)
    expected = HeadReader(olmoe, open_cases(olmoe, after), after, routing).stored
    torch.testing.assert_close(found.head.keys.tensors["keys"], expected.tensors["keys"])
    before = HeadReader(olmoe, open_cases(olmoe, memory), memory, routing).stored
    assert not torch.allclose(found.head.keys.tensors["keys"], before.tensors["keys"])


def test_no_head_is_chosen_unless_wanted(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    quick = replace(QUICK, steps=2, value_rates=())
    assert calibrate(olmoe, sayings_memory, config=quick).routing.head is None


def test_the_likeliest_head_is_found_and_useless_neighbours_have_no_weight() -> None:
    draw = torch.Generator().manual_seed(0)
    own = torch.full((400,), -3.0)
    distance = torch.rand(400, KS[-1], generator=draw).sort(dim=-1).values
    line = torch.zeros(400, dtype=torch.int64)
    never = NextTokens(own, distance, torch.zeros_like(distance, dtype=torch.bool), line)
    assert never.likeliest_head().config.weight == 0
    first = torch.zeros_like(never.right)
    first[:360, 0] = True
    tokens = never._replace(right=first)
    found = tokens.likeliest_head().config
    assert found.k == KS[0]
    assert found.weight == pytest.approx(0.7, abs=0.21)
    share = torch.softmax(-distance[:1, : found.k] * found.gamma_scale, dim=-1)[0, 0]
    expected = -torch.log((1 - found.weight) * own[0].exp() + found.weight * share)
    torch.testing.assert_close(tokens.losses(found)[0], expected)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("keys", ["router", "hidden"])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_what_is_tried_is_what_attaching_gives(
    factor: float,
    keys: str,
    alone: bool,
    olmoe: PreTrainedModel,
    unlike_memory: RoutingMemory,
) -> None:
    """With γ as found or given: the loss of one example, with the others attached."""
    memory = unlike_memory
    batch = next(split(memory.reference_tokens(), QUICK).judge.batches(1))
    given = None if factor == 1.0 else factor * max(layer.gamma for layer in memory.layers.values())
    head = HeadConfig(k=16, weight=0.3, gamma_scale=2.0, keys=keys, alone=alone)
    routing = replace(memory.routing, k=4, gamma=given, head=head)
    reader = HeadReader(olmoe, open_cases(olmoe, memory), memory, routing)
    tokens = reader.read([batch])[keys]
    mine = owners(memory.provenance) == batch.owner[0]
    whole = replace(memory, head_keys=reader.stored)
    others = leave_out(whole, memory.provenance.example_of_window[mine].tolist())
    with attach(olmoe, others, routing), torch.no_grad():
        logits = olmoe(batch.ids, use_cache=False).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, batch.ids[0, 1:], reduction="none")
    torch.testing.assert_close(tokens.losses(head), expected, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def unlike_memory(olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast) -> RoutingMemory:
    """A memory of which no two cases read the same tokens: there are no ties."""
    return build_memory(olmoe, zoo_tokenizer, make_texts(30), BUILD)


def leave_out(memory: RoutingMemory, examples: list[int]) -> RoutingMemory:
    """Return the memory without examples, but with its own γ."""
    head = memory.head_keys
    assert head is not None
    rest, rows = memory.provenance.without(examples)
    gammas = {index: layer.gamma for index, layer in memory.full_layers().items()}
    layers = {
        index: replace(layer, gamma=gammas[index])
        for index, layer in memory.without(examples).full_layers().items()
    }
    kept = HeadKeys({"keys": head.keys[rows]}, head.gamma)
    return replace(memory, layers=layers, provenance=rest, head_keys=kept)


@pytest.mark.slow
def test_the_best_of_all_kinds_is_chosen(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    """Also where routing is of no use; the head keys then come with the memory."""
    splits = split(sayings_memory.reference_tokens(), QUICK)
    parts = tuple(
        Baseline.of(olmoe, list(part.batches(4096))) for part in (splits.choose, splits.judge)
    )
    cases, routing = open_cases(olmoe, sayings_memory), sayings_memory.routing
    for routed in (True, False):
        found = choose_head(olmoe, cases, sayings_memory, routing, parts, routed=routed)
        kinds = [(trial.config.keys, trial.config.alone) for trial in found.tried]
        alone = [("router", True), ("hidden", True)]
        assert kinds == [("router", False), ("hidden", False), *alone] if routed else alone
        best = min(found.tried, key=lambda trial: trial.loss)
        assert found.config == best.config
        assert (found.keys is not None) == (found.config.keys == "hidden")
        assert found.helps
        if not routed:
            assert found.added.difference == pytest.approx(found.change.difference)


@pytest.mark.slow
def test_a_head_is_used_alone_where_routing_does_not_help(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    sayings_memory: RoutingMemory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Judgement, "better", False)
    quick = replace(QUICK, steps=1, value_rates=(), head=True)
    found = calibrate(olmoe, sayings_memory, config=quick)
    assert not found.helps
    assert found.routing.head is not None
    assert found.routing.head.alone
    sayings_memory.save_pretrained(tmp_path / "memory")
    memory = write_calibrated(found.apply(sayings_memory), tmp_path / "memory")
    assert (memory.head_keys is not None) == (found.routing.head.keys == "hidden")
    unseen = sayings(76)[40:]
    alone = mean_loss(olmoe, zoo_tokenizer, unseen)
    with attach(olmoe, memory):
        assert mean_loss(olmoe, zoo_tokenizer, unseen) < alone - 0.1


@pytest.mark.slow
def test_the_command_writes_a_head(olmoe_folder: Path, sayings_folder: Path) -> None:
    arguments = ("calibrate", olmoe_folder, sayings_folder, "-k", 4, "--value-rate", 0.3, "--head")
    tried = run_cli(*arguments, "--dry-run", "--json")
    assert tried.exit_code == 0, tried.output
    done = run_cli(*arguments, "--in-place")
    assert done.exit_code == 0, done.output
    head = RoutingMemory.from_pretrained(sayings_folder).routing.head
    assert head is not None
    assert json.loads(tried.stdout)["head"]["config"] == vars(head)
    keys = "last hidden state" if head.keys == "hidden" else "last router's input"
    assert f"by the {keys}" in done.output
    assert f"head ({head.k} cases, weight {head.weight:g}" in done.output
    assert f"weight {head.weight:g}" in (sayings_folder / "README.md").read_text(encoding="utf8")
    shown = run_cli("inspect", sayings_folder).stdout
    assert f"by the {keys}" in " ".join(shown.replace("│", " ").split())
