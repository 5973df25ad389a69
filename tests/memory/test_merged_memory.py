"""A memory of several domains as an artefact: written, merged again, cut, shown, grown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conftest import BUILD, family, make_texts
from helpers.calibrating import sayings
from helpers.indexed import CPU, logits
from helpers.merged import FACTOR, USE, dense, ids, merged, model, sparse, with_gamma  # noqa: F401
from knn_moe import RoutingConfig, RoutingMemory, build_memory, prune
from knn_moe.cli.main import main
from knn_moe.recall.recall import layer_gammas

BY_DOMAIN = "--gamma-by-domain"


def test_saved_and_opened_it_is_the_same(
    model: PreTrainedModel, merged: RoutingMemory, ids: Tensor, tmp_path: Path
) -> None:
    merged.save_pretrained(tmp_path / "memory")
    opened = RoutingMemory.from_pretrained(tmp_path / "memory")
    assert torch.equal(opened.provenance.domain, merged.provenance.domain)
    for index, layer in merged.layers.items():
        assert opened.layers[index].gamma == layer.gamma
        assert opened.layers[index].gammas == layer.gammas
    assert torch.equal(logits(model, opened, None, ids), logits(model, merged, None, ids))


def test_a_memory_of_one_domain_is_written_as_ever(
    sparse: RoutingMemory, merged: RoutingMemory, tmp_path: Path
) -> None:
    sparse.save_pretrained(tmp_path / "one")
    merged.save_pretrained(tmp_path / "two")
    one, two = (config_of(tmp_path / name) for name in ("one", "two"))
    assert "domains" not in one
    assert two["domains"] == merged.provenance.cases_of_domain
    assert all("gammas" not in layer for layer in one["layers"])
    tokens = set(load_file(tmp_path / "one" / "tokens.safetensors"))
    assert tokens == {"stream", "begin", "example_of_window", "offset_of_window", "key"}
    opened = RoutingMemory.from_pretrained(tmp_path / "one")
    assert opened.provenance.num_domains == 1
    assert not opened.provenance.domain.any()


def config_of(folder: Path) -> Any:
    return json.loads((folder / "memory_config.json").read_text(encoding="utf8"))


def test_merging_what_was_merged_keeps_all_domains(
    model: PreTrainedModel,
    merged: RoutingMemory,
    sparse: RoutingMemory,
    dense: RoutingMemory,
    ids: Tensor,
) -> None:
    third = with_gamma(sparse, 0.2)
    nested, flat = third.merge(merged), third.merge(sparse, dense, by_domain=True)
    assert nested.provenance.cases_of_domain == [len(third), len(sparse), len(dense)]
    assert nested.layers[1].gammas == flat.layers[1].gammas
    assert nested.layers[1].gammas[2] == dense.layers[1].gamma
    assert torch.equal(logits(model, nested, USE, ids), logits(model, flat, USE, ids))


def test_a_domain_without_cases(
    model: PreTrainedModel,
    merged: RoutingMemory,
    sparse: RoutingMemory,
    dense: RoutingMemory,
    ids: Tensor,
) -> None:
    rows = torch.arange(len(sparse), len(merged))
    left = merged.subset(rows)
    assert left.provenance.cases_of_domain == [0, len(dense)]
    assert left.layers[0].gammas == merged.layers[0].gammas
    alone = logits(model, dense, USE, ids)
    torch.testing.assert_close(logits(model, left, USE, ids), alone)
    unit = replace(USE, similarity="rbf-unit")
    torch.testing.assert_close(logits(model, left, unit, ids), logits(model, dense, unit, ids))


def test_dropping_computes_every_gamma_anew(
    merged: RoutingMemory, sparse: RoutingMemory, dense: RoutingMemory
) -> None:
    some, first = [0, 1, 2], len(sparse.provenance.example_of_window)
    rest = merged.without(some)
    other = with_gamma(dense, 1 / FACTOR)
    alone = sparse.without(some)
    for index, layer in rest.layers.items():
        expected = (alone.layers[index].gamma, other.layers[index].gamma)
        assert layer.gammas == pytest.approx(expected, rel=1e-6)
    assert rest.provenance.cases_of_domain == [len(alone), len(dense)]
    last = merged.without(range(first))
    assert last.provenance.num_domains == 1
    assert last.layers[0].gammas == ()
    assert last.layers[0].gamma == pytest.approx(other.layers[0].gamma, rel=1e-6)


def test_dropping_from_a_pruned_memory_keeps_every_gamma(
    model: PreTrainedModel, merged: RoutingMemory, sparse: RoutingMemory, ids: Tensor
) -> None:
    small = prune(None, merged, 0.5)
    rest = small.without([0])
    assert (rest.layers[0].gamma, rest.layers[0].gammas) == (
        merged.layers[0].gamma,
        merged.layers[0].gammas,
    )
    last = small.without(range(len(sparse.provenance.example_of_window)))
    assert last.layers[0].gammas == ()
    assert last.layers[0].gamma == merged.layers[0].gammas[1]


def test_a_domain_of_one_case_has_the_joint_gamma(
    merged: RoutingMemory, sparse: RoutingMemory
) -> None:
    one = merged.subset(torch.arange(len(sparse) + 1))
    gammas = layer_gammas(one, 0, RoutingConfig(similarity="rbf-unit"), CPU)
    assert gammas.domains[1] == gammas.joint != 1.0


# On the command line


def knn_moe(*words: object) -> Result:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and memories of two domains for it."""
    place = tmp_path_factory.mktemp("domains")
    model: PreTrainedModel = family("olmoe")
    model.save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    build_memory(model, tokenizer, make_texts(6), BUILD, folder=place / "one")
    build_memory(model, tokenizer, sayings(6), BUILD, folder=place / "two")
    return place


def test_merged_and_shown(folder: Path, tmp_path: Path) -> None:
    one, two = (RoutingMemory.from_pretrained(folder / name) for name in ("one", "two"))
    done = knn_moe(
        "merge", folder / "one", folder / "two", "-o", tmp_path / "both", "--json", BY_DOMAIN
    )
    assert json.loads(done.stdout)["domains"] == 2
    facts = json.loads(knn_moe("inspect", tmp_path / "both", "--json").stdout)
    assert facts["domains"] == [{"cases": len(one)}, {"cases": len(two)}]
    own = [one.layers[1].gamma, two.layers[1].gamma]
    assert facts["layers"][1]["gammas"] == own
    card = (tmp_path / "both" / "README.md").read_text(encoding="utf8")
    widths = sorted(layer.gamma for layer in one.layers.values())
    assert f"| domains | 2: {len(one):,} cases (γ {widths[0]:.3g} to {widths[1]:.3g}), " in card
    shown = knn_moe("inspect", tmp_path / "both").stdout
    assert "γ by domain" in shown
    assert f"{own[1]:.4g}" in shown
    knn_moe("merge", folder / "one", folder / "two", "-o", tmp_path / "plain")
    plain = json.loads(knn_moe("inspect", tmp_path / "plain", "--json").stdout)
    assert "domains" not in plain
    assert "gammas" not in plain["layers"][0]
    assert "γ by domain" not in knn_moe("inspect", tmp_path / "plain").stdout
    assert "| domains |" not in (tmp_path / "plain" / "README.md").read_text(encoding="utf8")


def test_what_is_appended_joins_the_only_domain_or_is_another(folder: Path, tmp_path: Path) -> None:
    knn_moe("merge", folder / "one", folder / "two", "-o", tmp_path / "both", BY_DOMAIN)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_texts(4, seed=3))
    (tmp_path / "more.jsonl").write_text(lines, encoding="utf8")
    grown = {}
    for name, source in (("one", folder / "one"), ("both", tmp_path / "both")):
        append = (tmp_path / "more.jsonl", "--append", source, "-o", tmp_path / f"{name}-grown")
        knn_moe("build", folder / "model", *append)
        grown[name] = RoutingMemory.from_pretrained(tmp_path / f"{name}-grown")
    assert grown["one"].provenance.num_domains == 1
    assert grown["one"].layers[0].gammas == ()
    both = RoutingMemory.from_pretrained(tmp_path / "both")
    new = sum(len(text.split()) for text in make_texts(4, seed=3))
    counts = grown["both"].provenance.cases_of_domain
    assert counts == [*both.provenance.cases_of_domain, new]
    assert grown["both"].layers[0].gammas[:2] == both.layers[0].gammas
