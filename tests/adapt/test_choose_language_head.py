"""A memory's head as calibration chooses it: by some examples, kept if others say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from knn_moe.adapt.calibrate.splits import own_reference, split
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import QUICK, cases_of, folders, loss, memory, model, sayings  # noqa: F401
from helpers.commands import knn_moe
from helpers.zoo import BUILD, make_texts
from knn_moe import HeadConfig, RoutingMemory, attach, build_memory, calibrate
from knn_moe.adapt.calibrate.language_head import KS, Told, likeliest, tell
from knn_moe.adapt.calibrate.result import Calibration
from knn_moe.reference.provenance import owners


@pytest.fixture(scope="module")
def chosen(model: PreTrainedModel, memory: RoutingMemory) -> Calibration:
    return calibrate(model, memory, config=replace(QUICK, head=True))


def test_calibration_finds_one_that_helps_on_text_that_nobody_has_seen(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    chosen: Calibration,
) -> None:
    fresh = sayings(76)[40:]
    alone = loss(model, tokenizer, fresh)
    calibrated = chosen.apply(memory)
    with attach(model, calibrated):
        both = loss(model, tokenizer, fresh)
    with attach(model, calibrated, replace(calibrated.routing, head=None)):
        routed = loss(model, tokenizer, fresh)
    assert both < routed < alone
    head = chosen.head
    assert head is not None
    assert head.helps
    assert calibrated.routing.head == head.config
    # What was promised of examples that had no part in the choice is what these gain.
    assert both - alone == pytest.approx(head.change.difference, abs=0.3)
    assert both - routed == pytest.approx(head.added.difference, abs=0.3)
    assert chosen.report()["head"]["config"]["k"] in KS


def test_one_is_not_chosen_unasked(model: PreTrainedModel, memory: RoutingMemory) -> None:
    quick = replace(QUICK, steps=2, value_rates=())
    assert calibrate(model, memory, config=quick).routing.head is None


def test_the_likeliest_is_found_and_chance_is_left_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    own = torch.full((400,), -3.0)
    distance = torch.rand(400, KS[-1], generator=draw).sort(dim=-1).values
    line = torch.zeros(400, dtype=torch.int64)
    never = Told(own, distance, torch.zeros_like(distance, dtype=torch.bool), line)
    assert likeliest(never).weight == 0
    first = torch.zeros_like(never.right)
    first[:360, 0] = True
    found = likeliest(never._replace(right=first))
    assert found.k == KS[0]
    assert found.weight == pytest.approx(0.7, abs=0.21)
    losses = never._replace(right=first).losses(found)
    near = distance[:1, : found.k]
    share = torch.softmax(-near * found.gamma_scale, dim=-1)[0, 0]
    expected = -torch.log((1 - found.weight) * own[0].exp() + found.weight * share)
    torch.testing.assert_close(losses[0], expected)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_what_is_tried_is_what_attaching_gives(
    factor: float, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """With γ as found or given: by the loss of one example, the others attached. No two cases read
    the same, of which either might be found."""
    memory = build_memory(model, tokenizer, make_texts(30), BUILD)
    reading = next(iter(split(own_reference(memory), QUICK).judging.readings(1)))
    given = None if factor == 1.0 else factor * max(layer.gamma for layer in memory.layers.values())
    routing = replace(memory.routing, k=4, gamma=given)
    told = tell(model, cases_of(model, memory), memory.provenance.following, routing, [reading])
    head = HeadConfig(k=16, weight=0.3, gamma_scale=2.0)
    mine = owners(memory.provenance) == reading.example[0]
    rest = memory.without(memory.provenance.example_of_window[mine].tolist())
    gammas = {index: layer.gamma for index, layer in memory.full_layers().items()}
    layers = {i: replace(layer, gamma=gammas[i]) for i, layer in rest.full_layers().items()}
    others = replace(rest, layers=layers, folder=None)
    with attach(model, others, replace(routing, head=head)), torch.no_grad():
        logits = model(reading.batch.ids, use_cache=False).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, reading.batch.ids[0, 1:], reduction="none")
    torch.testing.assert_close(told.losses(head), expected, rtol=1e-3, atol=1e-3)


# The commands


def test_a_head_is_asked_for(folders: tuple[Path, Path]) -> None:
    network, folder = folders
    asked = ("calibrate", network, folder, "-k", 4, "--value-rate", 0.3, "--head")
    tried = knn_moe(*asked, "--dry-run", "--json")
    assert tried.exit_code == 0, tried.output
    said = json.loads(tried.stdout)
    done = knn_moe(*asked)
    assert done.exit_code == 0, done.output
    found = RoutingMemory.from_pretrained(folder)
    head = found.routing.head
    assert head is not None
    assert said["head"]["config"] == vars(head)
    assert f"head ({head.k} cases, weight {head.weight:g}" in done.output
    assert f"weight {head.weight:g}" in (folder / "README.md").read_text(encoding="utf8")
    assert "head" in knn_moe("inspect", folder).stdout


def test_building_takes_one_only_with_calibration(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    network, _ = folders
    lines = "".join(json.dumps({"text": text}) + "\n" for text in sayings(40))
    (tmp_path / "reference.jsonl").write_text(lines)
    arguments = ("build", network, tmp_path / "reference.jsonl", "-o", tmp_path / "new", "--head")
    wrong = knn_moe(*arguments)
    assert wrong.exit_code == 2
    assert "--calibrate" in wrong.output
    assert not (tmp_path / "new").exists()
    done = knn_moe(*arguments, "--calibrate", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["calibration"]
    assert said["helps"] == (said["head"] is not None)
