"""experiments/train_smol_moe.py: branches and forms of a small GGUF model, from end to end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import train_smol_moe
from corpus import SEEN, UNSEEN
from helpers.small_gguf import small_llama, write_gguf
from helpers.small_mixtures import FORMS
from knn_moe.routers.find import find_routers
from smol_card import smol_card
from train_smol_moe import Recipe, Training, count_steps, draw_batches, next_token_loss

pytest.importorskip("gguf")
RECIPES = sorted((Path(train_smol_moe.__file__).parent / "recipes").glob("smol-*.json"))
SMALL = {"batch": 2, "length": 32, "warmup": 0.2}


def write_recipe(folder: Path, name: str) -> Path:
    path = folder / f"{name}.json"
    content = {
        "mixture": asdict(FORMS[name]),
        "branches": {"learning_rate": 1e-2, **SMALL},
        "training": {"learning_rate": 1e-3, "router_learning_rate": 1e-2, "steps": 6, **SMALL},
    }
    path.write_text(json.dumps(content))
    return path


class Workshop:
    """Runs the script on a small model and small data."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data, self.out = folder, data, folder / "out"
        self.gguf = write_gguf(folder / "small.gguf", small_llama())

    def make(self, names: Sequence[str], *options: object) -> None:
        places = ("--out", self.out, "--gguf", self.gguf, "--data", self.data, "--device", "cpu")
        recipes = [write_recipe(self.folder, name) for name in names]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_smol_moe, "check_knowledge", lambda model, tokenizer: None)
            train_smol_moe.main([str(part) for part in (*recipes, *places, *options)])

    def report(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / name / "training.json").read_text())
        return found


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, small_data: Path) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("smol"), small_data)
    shop.make(list(FORMS), "--branch-steps", 12)
    return shop


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_a_folder_like_any_other(form: str, workshop: Workshop) -> None:
    folder = workshop.out / form
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.model_type == FORMS[form].model_type
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id == 2
    report = workshop.report(form)
    assert report["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert report["active"] < report["parameters"]
    assert set(report["losses"]) == {*SEEN, *UNSEEN}
    assert report["history"]["steps"] == 6
    for state in ("start_", ""):
        assert report[state + "experts"].keys() == {"load", "busiest", "idlest", "divergence"}
        assert [len(part) for part in report[state + "logits"].values()] == [2, 2]  # layers
    assert report["start_logits"]["spread"] == pytest.approx([1, 1], abs=0.35)
    assert set(report["router_accuracy"]) == set(SEEN)
    assert all(report["losses"][name] < report["dense_losses"][name] for name in SEEN)
    assert (folder / "README.md").read_text(encoding="utf8") == smol_card(report)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_training_moves_every_router(form: str, workshop: Workshop) -> None:
    model = AutoModelForCausalLM.from_pretrained(workshop.out / form)
    for router in find_routers(model):
        copies = 5 if FORMS[form].shared else 6
        rows = router.weight.view(copies, -1, router.hidden_size)
        if rows.shape[1] > 1:  # shards have become different
            assert not torch.equal(rows[:, 0], rows[:, 1])


@pytest.mark.slow
def test_a_second_run_uses_the_branches_and_makes_the_same_model(workshop: Workshop) -> None:
    branch = workshop.out / "branches" / "legal.safetensors"
    weights = workshop.out / "whole" / "model.safetensors"
    before = branch.stat().st_mtime_ns, weights.read_bytes()
    workshop.make(["whole"], "--branch-steps", 12)
    assert (branch.stat().st_mtime_ns, weights.read_bytes()) == before
    assert "branch legal" not in workshop.report("whole")["seconds"]
    workshop.make(["whole"], "--branch-steps", 2, "--max-steps", 2, "--micro-batch", 1)
    assert branch.stat().st_mtime_ns != before[0]  # other settings, so it was trained again
    assert workshop.report("whole")["history"]["steps"] == 2


def test_recipes_with_different_branches_are_refused(tmp_path: Path) -> None:
    paths = [write_recipe(tmp_path, name) for name in ("whole", "shared")]
    content = json.loads(paths[1].read_text())
    content["branches"]["epochs"] = 7
    paths[1].write_text(json.dumps(content))
    with pytest.raises(SystemExit, match="train their branches differently"):
        train_smol_moe.main([*map(str, paths), "--out", str(tmp_path)])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_for_smollm2_and_five_branches(path: Path) -> None:
    mixture = Recipe.read(path).mixture
    config = AutoConfig.for_model(mixture.model_type, **mixture.config)
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    feed_forwards = len(SEEN) if mixture.shared else len(SEEN) + 1
    assert config.num_local_experts * width == feed_forwards * 1536
    assert config.num_experts_per_tok * width == (1536 if mixture.shared else 2 * 1536)
    if mixture.shared:
        assert config.n_shared_experts * width == 1536


def test_the_loss_in_chunks_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_smol_moe, "_CHUNK", 7)
    batch = torch.randint(3, 200, (2, 20))
    gradients = []
    for whole in (True, False):
        model = small_llama()
        loss = model(batch, labels=batch).loss if whole else next_token_loss(model, batch)
        loss.backward()
        gradients.append([loss, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_batches_go_on_after_an_epoch_in_another_order() -> None:
    training = Training(learning_rate=1.0, epochs=3, length=4, batch=2)
    documents = [torch.arange(20, dtype=torch.int32)]
    assert count_steps(documents, training) == 7
    batches = draw_batches(documents, training, "cpu")
    drawn = [next(batches) for _ in range(4)]
    assert all(batch.shape == (2, 4) for batch in drawn)
    assert not torch.equal(torch.cat(drawn[:2]), torch.cat(drawn[2:]))


def test_too_little_text_is_refused() -> None:
    training = Training(learning_rate=1.0, length=4, batch=2)
    with pytest.raises(ValueError, match="do not fill a batch of 2"):
        next(draw_batches([torch.arange(5)], training, "cpu"))
