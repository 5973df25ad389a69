"""Distilling: prototypes help on unseen text, are judged by it, and are a memory like any other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.calibrating import mean_loss, sayings
from helpers.commands import assert_refused, run_cli
from helpers.zoo import BUILD, encode
from knn_moe import (
    DistilConfig,
    Distillation,
    Example,
    HeadConfig,
    LayerRouting,
    RoutingConfig,
    RoutingMemory,
    attach,
    attach_all,
    build_distilled,
    build_memory,
    calibrate,
    compress,
    distil,
    prune,
)
from knn_moe.adapt.distil.prototypes import Prototypes, Start
from knn_moe.adapt.distil.trials import Distiller
from knn_moe.errors import (
    AttachError,
    CalibrationError,
    ConfigError,
    MemoryFormatError,
    MemoryMismatchError,
)
from knn_moe.memory.distilled import DistilledLayer
from knn_moe.recall.distilled import DistilledRecall
from knn_moe.reference.provenance import owners
from knn_moe.routers.find import find_routers
from knn_moe.support.progress import ignore_progress

QUICK = DistilConfig(prototypes=24, rates=(0.3,), passes=3, step_tokens=64)


@pytest.fixture(scope="module")
def distillation(olmoe: PreTrainedModel, sayings_memory: RoutingMemory) -> Distillation:
    """What is distilled from `sayings_memory`."""
    return distil(olmoe, sayings_memory, config=QUICK)


@pytest.fixture
def small(sayings_memory: RoutingMemory, distillation: Distillation) -> RoutingMemory:
    """`sayings_memory`, distilled."""
    return distillation.apply(sayings_memory)


@pytest.fixture
def layer() -> DistilledLayer:
    """Prototypes far from zero, which is where distances lose digits."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn
    return DistilledLayer(
        keys=3 + draw(7, 16, generator=generator),
        updates=draw(7, 4, generator=generator),
        linear=draw(4, 16, generator=generator),
        cases=torch.arange(7),
        gamma=0.1,
        log_threshold=-2.0,
    )


def recall_of(layer: DistilledLayer, factor: float = 1.0) -> DistilledRecall:
    return DistilledRecall(layer, RoutingConfig(k=3), factor, torch.device("cpu"))


def test_it_computes_what_the_equations_say(layer: DistilledLayer) -> None:
    inputs, logits = 3 + torch.randn(5, 16), torch.randn(5, 4)
    mixed, confidence = recall_of(layer, 0.5)(inputs, logits)
    for x, own, ours, found in zip(inputs, logits, mixed, confidence, strict=True):
        similarity = torch.exp(-0.1 * (x - layer.keys).double().square().sum(dim=-1))
        total = similarity.sum()
        share = float(0.5 * total / (torch.tensor(-2.0).double().exp() + total))
        update = (similarity[:, None] * layer.updates).sum(dim=0) / total + layer.linear @ x
        assert float(found) == pytest.approx(share, rel=1e-4)
        torch.testing.assert_close(ours, (own + share * update).float(), rtol=1e-4, atol=1e-4)


def test_far_from_all_prototypes_the_router_decides_alone(layer: DistilledLayer) -> None:
    logits = torch.randn(2, 4)
    mixed, confidence = recall_of(layer)(torch.full((2, 16), 1e4), logits)
    assert torch.equal(mixed, logits)
    assert not confidence.any()


def test_it_is_trained_as_it_is_used(layer: DistilledLayer, olmoe: PreTrainedModel) -> None:
    router = find_routers(olmoe)[0]
    router = replace(router, num_experts=4, hidden_size=16)
    start = Start(router, layer.keys, layer.gamma, layer.log_threshold, 1.0, 1.0, 1.0)
    trained = Prototypes(start, torch.float32)
    trained.updates.data = layer.updates
    trained.linear.data = layer.linear
    inputs, logits = 3 + torch.randn(6, 16), torch.randn(6, 4)
    trained.spared = torch.tensor([True] + [False] * 5)
    expected, _ = recall_of(trained.read())(inputs, logits)
    result = trained(inputs, logits)
    torch.testing.assert_close(result[1:], expected[1:], rtol=1e-4, atol=1e-4)
    assert torch.equal(result[0], logits[0])


def test_it_compiles_whole_and_takes_many_tokens(layer: DistilledLayer) -> None:
    recall = recall_of(layer)
    inputs, logits = 3 + torch.randn(9000, 16), torch.randn(9000, 4)
    mixed, confidence = recall(inputs, logits)
    parts = [recall(inputs[at], logits[at]) for at in torch.arange(9000).split(4000)]
    torch.testing.assert_close(mixed, torch.cat([part for part, _ in parts]))
    compiled = torch.compile(recall, fullgraph=True)
    torch.testing.assert_close(compiled(inputs[:5], logits[:5]), (mixed[:5], confidence[:5]))


@pytest.mark.slow
def test_it_helps_on_unseen_text_as_much_as_it_says(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    small: RoutingMemory,
    distillation: Distillation,
) -> None:
    unseen = sayings(76)[40:]
    alone = mean_loss(olmoe, zoo_tokenizer, unseen)
    with attach(olmoe, small):
        distilled = mean_loss(olmoe, zoo_tokenizer, unseen)
    assert distillation.helps
    change = distillation.judgement.change
    assert change.low < distilled - alone < change.high < 0
    assert mean_loss(olmoe, zoo_tokenizer, unseen) == alone


@pytest.mark.slow
def test_it_is_deterministic_and_needs_no_build_of_its_own(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    distillation: Distillation,
    tmp_path: Path,
) -> None:
    config = replace(BUILD, gradient="sparse")
    built, found = build_distilled(
        olmoe, zoo_tokenizer, sayings(40), config, QUICK, folder=tmp_path / "small"
    )
    assert found.judgement == distillation.judgement
    for index, layer in distillation.layers.items():
        assert all(map(torch.equal, built.layers[index].tensors.values(), layer.tensors.values()))
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.slow
def test_the_examples_that_judge_have_no_part(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    reference = sayings_memory.reference_tokens()
    distiller = Distiller(olmoe, sayings_memory, reference, QUICK, "sparse", ignore_progress)
    seen = sayings_memory.provenance
    held_out = {
        owner
        for part in distiller.splits[1:3]
        for owner in part.reference.owners[part.windows].tolist()
    }
    cases = distiller._unseen_cases()
    assert not held_out & set(owners(seen)[seen.window][cases].tolist())
    assert not held_out & {owner for batch in distiller.batches for owner in batch.owner.tolist()}
    assert held_out


def test_widths_suit_cases_that_the_prototypes_were_not_made_of(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    """Also where there are as many prototypes as could be."""
    router, keys = find_routers(olmoe)[0], sayings_memory.full_layers()[0].keys.float()
    seen, unseen = torch.arange(0, len(keys) // 2), torch.arange(len(keys) // 2, len(keys))
    start = Start.of(router, keys, seen, len(keys))
    assert len(start.keys) == len(seen) // 4
    distances = torch.cdist(keys[unseen], start.keys).square()
    assert 2 < start.gamma * float(distances.amin(dim=1).mean()) < 8
    reached = (-start.gamma * distances).logsumexp(dim=1).mean() - start.log_threshold
    assert 1 < float(reached) < 7


@pytest.mark.slow
def test_a_small_memory_gains_with_the_default_number_of_prototypes(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    found = distil(olmoe, sayings_memory, config=replace(QUICK, prototypes=1024))
    assert found.helps
    assert all(len(layer) < len(sayings_memory) // 4 for layer in found.layers.values())


@pytest.mark.slow
def test_cases_that_the_examples_chose_are_refused(
    olmoe: PreTrainedModel, sayings_memory: RoutingMemory
) -> None:
    with pytest.raises(CalibrationError, match="pruned by what its own examples gained"):
        distil(olmoe, prune(olmoe, sayings_memory, 0.5), config=QUICK)
    assert distil(olmoe, prune(olmoe, sayings_memory, 0.5, by="chance"), config=QUICK).helps
    bare = replace(sayings_memory.build, loss="completion")
    manifest = replace(sayings_memory.manifest, build=bare)
    with pytest.raises(CalibrationError, match="Give its examples"):
        distil(olmoe, replace(sayings_memory, manifest=manifest), config=QUICK)


def test_it_is_applied_to_its_own_memory_alone(
    distillation: Distillation, sayings_memory: RoutingMemory
) -> None:
    with pytest.raises(MemoryMismatchError, match="not the memory that was distilled"):
        distillation.apply(sayings_memory.subset(torch.arange(5)))


@pytest.mark.slow
def test_prototypes_that_cannot_help_are_turned_off(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Texts of words at random have nothing to learn from each other."""
    texts = [" ".join(text.split()[::-1]) for text in (sayings(1, seed)[0] for seed in range(40))]
    memory = build_memory(olmoe, zoo_tokenizer, texts, BUILD)
    found = distil(olmoe, memory, config=replace(QUICK, rates=(3.0,), passes=1))
    assert not found.helps
    assert found.off == list(memory.layers)
    ids = encode(zoo_tokenizer, texts[0])
    with torch.no_grad():
        alone = olmoe(ids).logits
        with attach(olmoe, found.apply(memory)):
            assert torch.equal(olmoe(ids).logits, alone)


@pytest.mark.slow
def test_it_is_a_memory_like_any_other(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    small: RoutingMemory,
    sayings_memory: RoutingMemory,
    tmp_path: Path,
) -> None:
    layers = [layer for layer in small.layers.values() if isinstance(layer, DistilledLayer)]
    small.save_pretrained(tmp_path / "small")
    opened = RoutingMemory.from_pretrained(tmp_path / "small")
    assert opened.distilled
    assert "distilled" in repr(opened)
    card = (tmp_path / "small" / "README.md").read_text(encoding="utf8")
    assert "24 prototypes per layer, learned from 40 reference examples" in card
    assert "| distilled | -" in card
    assert "distilled" in opened._repr_html_()
    assert opened.nbytes == small.nbytes < sayings_memory.nbytes
    text = sayings(50)[-1]
    ids = encode(zoo_tokenizer, text)
    with torch.no_grad():
        with attach(olmoe, small):
            expected = olmoe(ids).logits
        with attach(olmoe, opened) as routing:
            assert torch.equal(olmoe(ids).logits, expected)
            explanation = routing.explain(text, tokenizer=zoo_tokenizer)
        several = attach_all(olmoe, {"small": opened, "whole": sayings_memory})
        with several, several.using("small"):
            assert torch.equal(olmoe(ids).logits, expected)
    assert {stats.tokens for stats in routing.stats().values()} == {ids.shape[1] - 1}
    token = explanation.to_dict()["sequences"][0][-1]
    recalled = [case for effect in token["effects"] for case in effect["cases"]]
    assert {case["row"] for case in recalled} <= set(torch.cat([x.cases for x in layers]).tolist())
    assert all(case["token"] for case in recalled)
    manifest = replace(small.manifest, base_model=replace(small.base_model, fingerprint="0" * 64))
    with pytest.raises(MemoryMismatchError):
        attach(olmoe, replace(small, manifest=manifest))


def test_what_needs_the_cases_is_refused(
    olmoe: PreTrainedModel, small: RoutingMemory, sayings_memory: RoutingMemory, tmp_path: Path
) -> None:
    for use in (
        lambda: calibrate(olmoe, small),
        lambda: compress(small, "fast", tmp_path / "out"),
        lambda: prune(olmoe, small),
        lambda: distil(olmoe, small, config=QUICK),
        lambda: sayings_memory.merge(small),
    ):
        with pytest.raises(MemoryFormatError, match="Use the memory that it was made"):
            use()
    for config in (
        RoutingConfig(gamma_scale=2.0),
        RoutingConfig(similarity="cosine"),
        RoutingConfig(index="fast"),
        RoutingConfig(per_layer=(LayerRouting(layer=0, gamma_scale=2.0),)),
    ):
        with pytest.raises(ConfigError, match="its own widths and searches nothing"):
            attach(olmoe, small, config)
    with pytest.raises(ConfigError, match="no language-model head"):
        attach(olmoe, small, RoutingConfig(head=HeadConfig(keys="hidden")))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_distilled(
    olmoe: PreTrainedModel,
    zoo_tokenizer: PreTrainedTokenizerFast,
    sayings_memory: RoutingMemory,
    tmp_path: Path,
) -> None:
    with attach(olmoe, sayings_memory), pytest.raises(AttachError, match="memory attached"):
        distil(olmoe, sayings_memory, config=QUICK)
    with pytest.raises(CalibrationError, match="there are 5"):
        build_distilled(olmoe, zoo_tokenizer, sayings(5), folder=tmp_path / "small")
    with pytest.raises(ConfigError, match="tokenizer="):
        distil(olmoe, sayings_memory, sayings(40), QUICK)
    for wrong, name in (({"prototypes": 0}, "prototypes"), ({"rates": ()}, "rates")):
        with pytest.raises(ConfigError, match=name):
            DistilConfig(**wrong)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_questions_are_learned_by_the_choice(
    olmoe: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    examples = [
        Example(f"{3 + at} {4 + at % 5}", " 20", distractors=(" 40", " 41")) for at in range(105)
    ]
    _, found = build_distilled(olmoe, zoo_tokenizer, examples, BUILD, replace(QUICK, passes=8))
    assert found.by_choices
    assert found.judgement.alone == pytest.approx(1.0986, abs=0.3)  # of three choices
    assert found.helps


@pytest.mark.slow
def test_the_commands(
    olmoe_folder: Path, sayings_folder: Path, sayings_memory: RoutingMemory, tmp_path: Path
) -> None:
    options = ("--prototypes", 24, "--rate", 0.3, "--passes", 2, "--dtype", "float32")
    target = tmp_path / "small"
    done = run_cli("distil", olmoe_folder, sayings_folder, "-o", target, *options)
    assert done.exit_code == 0, done.output
    assert "rate 0.3" in done.stdout
    assert "times smaller" in done.output
    shown = json.loads(run_cli("inspect", target, "--json").stdout)
    assert [layer["prototypes"] for layer in shown["layers"]] == [24, 24]
    assert "distilled" in run_cli("inspect", target).stdout
    assert_refused(run_cli("distil", olmoe_folder, sayings_folder, "-o", target), "--overwrite")
    examples = tmp_path / "ref.jsonl"
    examples.write_text("\n".join(json.dumps({"text": text}) for text in sayings(40)))
    build = ("build", olmoe_folder, examples, "-o", tmp_path / "built", "--dtype", "float32")
    done = run_cli(*build, "--distil", "--prototypes", 24, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["cases"] == len(sayings_memory)
    assert len(facts["calibration"]["trials"]) > 1
    assert RoutingMemory.from_pretrained(tmp_path / "built").distilled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--distil --calibrate", "contradict each other"),
        ("--prototypes 8", "Add --distil"),
        ("--distil --resume", "no part of a build that could be continued"),
        ("--distil --loss all", "--loss all was given"),
        ("--distil --steps 3", "--distil chooses steps itself"),
        ("--distil --append MEMORY", "--append and --distil cannot be combined"),
        ("--distil --prototypes 0", "prototypes must be a whole number of at least 1, got 0"),
    ],
)
def test_contradictory_options(
    options: str, message: str, olmoe_folder: Path, sayings_folder: Path, tmp_path: Path
) -> None:
    examples = tmp_path / "ref.jsonl"
    examples.write_text("\n".join(json.dumps({"text": text}) for text in sayings(40)))
    words = options.replace("MEMORY", str(sayings_folder)).split()
    output = tmp_path / "out"
    assert_refused(run_cli("build", olmoe_folder, examples, "-o", output, *words), message)
    assert not output.exists()


@pytest.mark.parametrize("name", ["keys", "updates", "linear", "cases", "prototypes"])
def test_a_forged_layer_is_refused(name: str, small: RoutingMemory, tmp_path: Path) -> None:
    index, layer = next(iter(small.layers.items()))
    assert isinstance(layer, DistilledLayer)
    broken = {
        "keys": {"keys": torch.full_like(layer.keys, float("nan"))},
        "updates": {"updates": layer.updates[:, :-1]},
        "linear": {"linear": layer.linear.double()},
        "cases": {"cases": layer.cases + len(small)},
        "prototypes": {"keys": layer.keys[:-1]},
    }[name]
    forged = replace(small, layers={**small.layers, index: replace(layer, **broken)})
    forged.save_pretrained(tmp_path / "forged")
    with pytest.raises(MemoryFormatError):
        RoutingMemory.from_pretrained(tmp_path / "forged")
