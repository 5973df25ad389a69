"""A memory that calibrates itself: it is no judge of itself, and is silent where it is no use."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conftest import BUILD, VOCABULARY, encode, family, make_texts
from knn_moe import (
    IndexConfig,
    RoutingConfig,
    RoutingMemory,
    attach,
    build_memory,
    calibrate,
    compress,
    compression,
    find_routers,
)
from knn_moe.calibration import Calibration, CalibrationConfig, build_calibrated
from knn_moe.calibration.fit import (
    Cases,
    Studied,
    find_neighbours,
    fit_kernels,
    mixing,
    recalled_loss,
)
from knn_moe.calibration.judge import Baseline, judge
from knn_moe.calibration.kernels import DivergedError, Kernels
from knn_moe.calibration.slices import Slice, own_reference, split
from knn_moe.calibration.targets import TRUSTS, choose_targets
from knn_moe.calibration.values import learn_values
from knn_moe.cli.main import main
from knn_moe.compressed import CompressedLayer
from knn_moe.config import PRESETS, LayerKernel
from knn_moe.errors import (
    CalibrationError,
    ConfigError,
    MemoryFormatError,
    MemoryMismatchError,
)
from knn_moe.gate import own_logits
from knn_moe.optimise import summed_loss
from knn_moe.provenance import owners
from knn_moe.recall import Kernel

QUICK = CalibrationConfig(steps=48, step_tokens=64, neighbours=(1, 4), value_rates=(0.3,))


def sayings(count: int, seed: int = 0) -> list[str]:
    """Texts of a few phrases in any order: what one says helps to read another."""
    draw = random.Random(seed)
    phrases = [[str(draw.randrange(3, VOCABULARY)) for _ in range(6)] for _ in range(5)]
    draw = random.Random(seed + 1)
    return [" ".join(word for _ in range(3) for word in draw.choice(phrases)) for _ in range(count)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return family("olmoe")


@pytest.fixture(scope="module")
def memory(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> RoutingMemory:
    config = replace(BUILD, steps=5, learning_rate=20.0)
    return build_memory(model, tokenizer, sayings(40), config)


@pytest.fixture(scope="module")
def found(model: PreTrainedModel, memory: RoutingMemory) -> Calibration:
    return calibrate(model, memory, config=QUICK)


def loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> float:
    total, tokens = 0.0, 0
    for text in texts:
        ids = encode(tokenizer, text)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
    return total / tokens


def test_what_is_found_helps_on_text_that_nobody_has_seen(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    found: Calibration,
) -> None:
    fresh = sayings(76)[40:]
    alone = loss(model, tokenizer, fresh)
    with attach(model, memory):
        usual = loss(model, tokenizer, fresh)
    with attach(model, memory, found.routing):
        routed = loss(model, tokenizer, fresh)
    with attach(model, found.apply(memory)):
        calibrated = loss(model, tokenizer, fresh)
    assert found.helps
    assert found.chosen == "values, rate 0.3"
    assert calibrated < routed < usual < alone
    assert found.judgement.change.low < calibrated - alone < found.judgement.change.high


def test_it_can_be_had_again(
    model: PreTrainedModel, memory: RoutingMemory, found: Calibration
) -> None:
    again = calibrate(model, memory, config=QUICK)
    assert again.routing == found.routing
    assert again.judgement == found.judgement
    assert all(again.values[layer].equal(values) for layer, values in found.values.items())


def test_the_reference_set_given_is_the_memory_s_own(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    found: Calibration,
) -> None:
    given = calibrate(model, memory, sayings(40), QUICK, tokenizer=tokenizer)
    assert given.routing == found.routing
    with pytest.raises(ConfigError, match="tokenizer="):
        calibrate(model, memory, sayings(40), QUICK)


def test_a_memory_that_misleads_keeps_silent(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, memory: RoutingMemory
) -> None:
    """Values as far on the wrong side of the router's own as they were on the right one."""
    layers = {}
    for router in find_routers(model):
        layer = memory.full_layers()[router.layer]
        own = own_logits(router, layer.keys).detach()
        layers[router.layer] = replace(layer, values=2 * own - layer.values)
    silent = calibrate(model, replace(memory, layers=layers, folder=None), config=QUICK)
    assert not silent.helps
    ids = encode(tokenizer, sayings(50)[-1])
    with torch.no_grad():
        expected = model(ids).logits
        with attach(model, memory, silent.routing) as routing:
            assert torch.equal(model(ids).logits, expected)
    assert routing.stats() == {}


def cases_of(model: PreTrainedModel, memory: RoutingMemory) -> list[Cases]:
    owner = owners(memory.provenance)[memory.provenance.window]
    layers = memory.full_layers()
    return [Cases.of(router, layers[router.layer], owner) for router in find_routers(model)]


def study(model: PreTrainedModel, memory: RoutingMemory, cases: list[Cases]) -> Studied:
    readings = list(split(own_reference(memory), QUICK).fitting.readings(64))
    return find_neighbours(model, cases, readings, 4)


def test_an_example_never_recalls_itself(model: PreTrainedModel, memory: RoutingMemory) -> None:
    owner = owners(memory.provenance)[memory.provenance.window]
    studied = study(model, memory, cases_of(model, memory))
    for layer in studied.neighbours:
        for reading, rows in zip(studied.readings, layer.rows, strict=True):
            real = reading.owner != 0
            assert (owner[rows[real]] != reading.owner[real, None]).all()


def test_twins_are_one_example(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = sayings(40)
    twice = build_memory(model, tokenizer, [*texts, *texts], BUILD)
    assert len(owners(twice.provenance).unique()) == len(set(texts))
    parts = split(own_reference(twice), QUICK)
    fitting, choosing, judging, everything = (
        set(part.owner[part.windows].tolist()) for part in parts
    )
    assert not fitting & (choosing | judging)
    assert not choosing & judging
    assert everything == fitting | choosing | judging
    assert len(parts.everything.windows) == 2 * len(texts)
    assert sum(len(part.windows) for part in parts[:3]) == 2 * len(texts)


def test_too_few_examples_are_refused(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    few = build_memory(model, tokenizer, sayings(5), BUILD)
    with pytest.raises(CalibrationError, match="5 different examples"):
        calibrate(model, few)


def test_what_cannot_be_calibrated(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, memory: RoutingMemory
) -> None:
    with attach(model, memory), pytest.raises(CalibrationError, match="memory attached"):
        calibrate(model, memory, config=QUICK)
    one = build_memory(model, tokenizer, sayings(1), BUILD)
    with pytest.raises(CalibrationError, match="no others to recall"):
        calibrate(model, one, sayings(40), QUICK, tokenizer=tokenizer)
    words = build_memory(model, tokenizer, [str(number) for number in range(3, 40)], BUILD)
    with pytest.raises(CalibrationError, match="Only 0 of the examples"):
        calibrate(model, words, config=QUICK)
    small = replace(memory, layers={0: compress_layer(memory)})
    with pytest.raises(MemoryFormatError, match="no keys to work on"):
        calibrate(model, small, config=QUICK)


def compress_layer(memory: RoutingMemory) -> CompressedLayer:
    layer, routing = memory.full_layers()[0], RoutingConfig(index="fast")  # type: ignore[arg-type]
    return compression.compress_layer(
        layer, layer.gamma, Kernel.single(layer.gamma), routing, torch.device("cpu")
    )


def test_it_works_where_nothing_else_learns(
    model: PreTrainedModel, memory: RoutingMemory, found: Calibration
) -> None:
    with torch.inference_mode():
        assert calibrate(model, memory, config=QUICK).routing == found.routing


def test_only_the_layers_that_the_memory_is_used_on(
    model: PreTrainedModel, memory: RoutingMemory
) -> None:
    header = replace(memory.header, routing=RoutingConfig(layers=(1,)))
    partly = calibrate(model, replace(memory, header=header), config=QUICK)
    assert [kernel.layer for kernel in partly.routing.kernels] == [1]
    assert partly.routing.layers == (1,)


def test_another_model_s_memory_only_by_force(
    model: PreTrainedModel, memory: RoutingMemory, found: Calibration
) -> None:
    header = replace(memory.header, base_model=replace(memory.base_model, fingerprint="0" * 64))
    foreign = replace(memory, header=header)
    with pytest.raises(MemoryMismatchError, match="force"):
        calibrate(model, foreign, config=QUICK)
    assert calibrate(model, foreign, config=QUICK, force=True).routing == found.routing


def test_judging_is_what_attaching_does(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """For examples that are not in the memory, where there is nothing to leave out."""
    memory = build_memory(model, tokenizer, make_texts(20), BUILD)
    kernels = tuple(
        LayerKernel(layer=layer, gamma_scale=0.5, confidence_scale=0.2, trust=0.8)
        for layer in memory.layers
    )
    routing = RoutingConfig(k=3, kernels=kernels)
    others = build_memory(model, tokenizer, make_texts(24, seed=1), BUILD)
    readings = list(split(own_reference(others), QUICK).judging.readings(64))
    judged = judge(model, cases_of(model, memory), Baseline.of(model, readings), routing)
    with torch.no_grad(), attach(model, memory, routing) as attached:
        total = sum(float(summed_loss(model, reading.batch)) for reading in readings)
    assert judged.loss == pytest.approx(total / judged.tokens, rel=1e-5)
    for layer, stats in attached.stats().items():
        assert judged.mean_confidence[layer] == pytest.approx(stats.mean_confidence, rel=1e-4)


def test_more_steps_fit_better(model: PreTrainedModel, memory: RoutingMemory) -> None:
    cases = cases_of(model, memory)
    studied = study(model, memory, cases)
    losses = [
        recalled(model, cases, studied, fit_kernels(model, cases, studied, 4, steps))
        for steps in (8, 32, 96)
    ]
    assert losses == sorted(losses, reverse=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(router.scope._forward_pre_hooks for router in find_routers(model))


def recalled(
    model: PreTrainedModel, cases: list[Cases], studied: Studied, found: tuple[LayerKernel, ...]
) -> float:
    """The loss of all readings, with these kernels and four cases each."""
    kernels = Kernels({each.router.layer: each.gamma for each in cases}, torch.device("cpu"), found)
    with torch.no_grad(), mixing(cases, kernels, 4) as mixes:
        places = range(len(studied.readings))
        return sum(float(recalled_loss(model, mixes, studied, place)[0]) for place in places)


def test_values_learn_from_those_who_recall_them(
    model: PreTrainedModel, memory: RoutingMemory
) -> None:
    """Adam's first step is down the others' loss, whose slope is found here by differences; what
    nobody recalls stays."""
    cases = cases_of(model, memory)
    studied = study(model, memory, cases)
    studied = Studied(studied.readings[:1], studied.neighbours)
    kernels = tuple(LayerKernel(layer=each.router.layer, trust=0.9) for each in cases)
    start, rate = RoutingConfig(k=4, kernels=kernels), 1e-3
    _, learned = learn_values(model, cases, studied, start, 1, rate)
    for place, (each, after) in enumerate(zip(cases, learned, strict=True)):
        step = (after.values - each.values) / rate
        recalled_rows = studied.neighbours[place].rows[0].unique()
        unknown = torch.ones(len(step), dtype=torch.bool)
        unknown[recalled_rows] = False
        assert not step[unknown].any()
        slopes = {}
        for row in recalled_rows[:6].tolist():
            losses = []
            for change in (0.1, -0.1):
                values = each.values.clone()
                values[row, 0] += change
                moved = [*cases]
                moved[place] = replace(each, values=values)
                losses.append(recalled(model, moved, studied, kernels))
            slopes[row] = losses[0] - losses[1]
        row = max(slopes, key=lambda row: abs(slopes[row]))
        assert step[row, 0].item() == pytest.approx(-math.copysign(1, slopes[row]), rel=1e-2)
    assert cases[0].values.equal(memory.full_layers()[0].values)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("neighbours", ()),
        ("neighbours", (0,)),
        ("held_out", 0.5),
        ("value_rates", (0.0,)),
        ("passes", 0),
        ("fit_tokens", 0),
        ("judge_tokens", 0),
        ("steps", 0),
        ("step_tokens", 0),
    ],
)
def test_bad_settings(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        CalibrationConfig(**{field: value})  # type: ignore[arg-type]


def test_compressing_keeps_it_and_merging_forgets_what_it_was_worth(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    found: Calibration,
    tmp_path: Path,
) -> None:
    calibrated = found.apply(memory)
    small = compress(calibrated, "fast", tmp_path / "small")
    assert small.routing == replace(found.routing, index=IndexConfig(kind="fast"))
    assert small.header.calibration == found.report()
    ids = torch.arange(3, 60)[None]
    seen = []
    for each in (calibrated, small):
        with torch.no_grad(), attach(model, each) as routing:
            model(ids)
        seen.append([layer.mean_confidence for layer in routing.stats().values()])
    assert seen[1] == pytest.approx(seen[0], abs=0.05)
    for examples in (None, sayings(40)):
        with pytest.raises(CalibrationError, match="were learned from its own examples"):
            calibrate(model, calibrated, examples, QUICK, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="those to drop included"):
        calibrated.without([0])
    merged = memory.merge(calibrated)
    assert merged.header.learned
    assert merged.routing == memory.build.routing()
    assert merged.header.calibration is None


def test_targets_are_worth_what_a_memory_of_them_is(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, memory: RoutingMemory
) -> None:
    """The loss of the best way, against a memory of the sample built in that way and judged."""
    owner = owners(memory.provenance)
    readings = list(Slice(own_reference(memory), [*range(len(owner))], owner).readings(1024))
    tried = choose_targets(model, find_routers(model), readings, BUILD)
    assert [way.loss for way in tried] == sorted(way.loss for way in tried)
    assert len({(way.gradient, way.learning_rate, way.steps) for way in tried}) == 2 * 5 * 2
    for way in (tried[0], tried[-1]):
        built = build_memory(model, tokenizer, sayings(40), way.of(BUILD))
        gammas = {layer: one.gamma for layer, one in built.full_layers().items()}
        cases = cases_of(model, built)
        assert [each.gamma for each in cases] == list(gammas.values())
        alone = Baseline.of(model, readings)
        ways = [RoutingConfig(**PRESETS["strong"]["routing"], trust=trust) for trust in TRUSTS]
        judged = [judge(model, cases, alone, routing) for routing in ways]
        assert way.loss == pytest.approx(min(one.loss for one in judged), abs=0.1)
    assert tried[0].loss < judged[0].alone


def test_targets_are_chosen_without_those_who_judge(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[int] = set()

    def watched(*args: Any, **kwargs: Any) -> Any:
        for reading in args[2]:
            seen.update(reading.example.tolist())
        return choose_targets(*args, **kwargs)

    monkeypatch.setattr("knn_moe.calibration.build.choose_targets", watched)
    build_calibrated(model, tokenizer, sayings(40), replace(BUILD, batch_tokens=1024), QUICK)
    parts = split(own_reference(memory), QUICK)
    for part in (parts.choosing, parts.judging):
        assert not seen & set(part.owner[part.windows].tolist())
    assert seen <= set(parts.fitting.owner[parts.fitting.windows].tolist())


def test_what_leads_nowhere_is_left_out(
    model: PreTrainedModel, memory: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*args: Any, **kwargs: Any) -> None:
        raise DivergedError

    monkeypatch.setattr("knn_moe.calibration.trials.learn_values", diverge)
    kept = calibrate(model, memory, config=QUICK)
    assert [trial.name for trial in kept.trials] == [
        "kernels, K = 1",
        "kernels, K = 4",
        "as it was",
    ]
    assert kept.values is None
    monkeypatch.setattr("knn_moe.calibration.trials.fit_kernels", diverge)
    with pytest.raises(CalibrationError, match="finite loss"):
        calibrate(model, memory, config=QUICK)


def test_values_that_are_no_numbers(model: PreTrainedModel, memory: RoutingMemory) -> None:
    layers = {
        index: replace(layer, values=layer.values * float("nan"))
        for index, layer in memory.full_layers().items()
    }
    with pytest.raises(CalibrationError, match="finite loss"):
        calibrate(model, replace(memory, layers=layers, folder=None), config=QUICK)


def test_distances_are_those_of_the_cases_recalled(
    model: PreTrainedModel, memory: RoutingMemory, found: Calibration
) -> None:
    cases = cases_of(model, memory)
    studied = study(model, memory, cases)
    for each, near in zip(cases, studied.neighbours, strict=True):
        one = found.distances[each.router.layer]
        assert one.nearest == pytest.approx(near.mean_distance(0), rel=1e-3)
        assert one.last == pytest.approx(near.mean_distance(found.routing.k - 1), rel=1e-3)
        assert 0 < one.nearest <= one.last


def test_a_memory_that_chooses_everything(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder, config = tmp_path / "memory", replace(BUILD, batch_tokens=1024)
    memory, found = build_calibrated(model, tokenizer, sayings(40), config, QUICK, folder=folder)
    best = found.targets[0]
    assert (memory.build.learning_rate, memory.build.steps) == (best.learning_rate, best.steps)
    assert memory.build.max_length == BUILD.max_length
    again = RoutingMemory.from_pretrained(folder)
    assert again.routing == found.routing == memory.routing
    assert again.header.calibration == json.loads(json.dumps(found.report()))
    assert again.layers[0].values.equal(found.apply(memory).full_layers()[0].values)
    with pytest.raises(CalibrationError, match="5 different examples"):
        build_calibrated(model, tokenizer, sayings(5), BUILD, QUICK, folder=tmp_path / "few")
    assert not list(tmp_path.glob("*few*"))


# The command


@pytest.fixture
def folders(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    memory: RoutingMemory,
    tmp_path: Path,
) -> tuple[Path, Path]:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    memory.save_pretrained(tmp_path / "memory")
    return tmp_path / "model", tmp_path / "memory"


def knn_moe(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_writes_what_it_finds(
    folders: tuple[Path, Path], model: PreTrainedModel
) -> None:
    network, folder = folders
    before = RoutingMemory.from_pretrained(folder)
    asked = ("calibrate", network, folder, "-k", 4, "--value-rate", 0.3)
    tried = knn_moe(*asked, "--dry-run", "--json")
    assert tried.exit_code == 0, tried.output
    assert RoutingMemory.from_pretrained(folder).header == before.header
    done = knn_moe(*asked)
    assert done.exit_code == 0, done.output
    assert "K = 4" in done.stdout
    after = RoutingMemory.from_pretrained(folder)
    said = json.loads(tried.stdout)
    assert after.routing.to_dict() == said["routing"]
    assert after.header.calibration["change"] == said["change"]
    assert after.layers[0].keys.equal(before.layers[0].keys)
    assert not after.layers[0].values.equal(before.layers[0].values)
    with attach(model, after) as routing:
        assert routing.config == after.routing
    shown = knn_moe("inspect", folder).stdout
    assert f"{said['change']['difference']:+.4f} nats a token" in shown
    assert "γ × to weigh" in shown
    card = (folder / "README.md").read_text(encoding="utf8")
    assert f"| calibrated | {said['change']['difference']:+.3f} nats a token" in card


def test_building_and_calibrating_at_once(folders: tuple[Path, Path], tmp_path: Path) -> None:
    network, _ = folders
    lines = "".join(json.dumps({"text": text}) + "\n" for text in sayings(40))
    (tmp_path / "reference.jsonl").write_text(lines)
    arguments = ("build", network, tmp_path / "reference.jsonl", "-o", tmp_path / "new")
    for more, message in (
        (("--steps", 3), "--calibrate chooses steps"),
        (("--append", folders[1]), "do not go together"),
    ):
        refused = knn_moe(*arguments, "--calibrate", *more)
        assert refused.exit_code == 2
        assert message in " ".join(refused.stderr.split())
    done = knn_moe(*arguments, "--calibrate", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    after = RoutingMemory.from_pretrained(tmp_path / "new")
    assert after.header.calibration == said["calibration"]
    assert after.build.learning_rate == said["calibration"]["targets"][0]["learning_rate"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("memory", "model", "new", "reference.jsonl")
    ]


def test_the_command_refuses(folders: tuple[Path, Path], tmp_path: Path) -> None:
    network, folder = folders
    before = sorted(path.read_bytes() for path in folder.iterdir())
    (tmp_path / "few.jsonl").write_text(json.dumps({"text": "4 5 6 7"}) + "\n")
    for arguments, message in (
        ((network, folder, tmp_path / "few.jsonl"), "1 different examples"),
        ((network, folder, tmp_path / "none.jsonl"), "none.jsonl"),
        ((network, tmp_path / "nothing"), "nothing"),
        ((network, folder, "-k", 0), "neighbours must be"),
        ((network, folder, "--keep-values", "--value-rate", 0.1), "do not go together"),
    ):
        result = knn_moe("calibrate", *arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
    assert sorted(path.read_bytes() for path in folder.iterdir()) == before
