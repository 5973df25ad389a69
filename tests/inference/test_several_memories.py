"""Several memories on one model: each call and each row is routed by its own, and by no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.near_ties import assert_no_near_ties
from helpers.zoo import BUILD, family, make_texts
from knn_moe import RoutingConfig, RoutingMemory, attach, attach_all, build_memory, find_routers
from knn_moe.errors import AttachError, ConfigError, MemoryMismatchError

NAMES = ("medicine", "law")
ROWS = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["olmoe", "qwen3_moe", "gpt_oss"])
def family_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return family(request.param)


@pytest.fixture(scope="module")
def memories(
    family_model: PreTrainedModel, zoo_tokenizer: PreTrainedTokenizerFast
) -> dict[str, RoutingMemory]:
    config = replace(BUILD, learning_rate=20.0)
    texts = [make_texts(12, seed=seed) for seed in range(2)]
    built = (build_memory(family_model, zoo_tokenizer, part, config) for part in texts)
    result = dict(zip(NAMES, built, strict=True))
    for memory in result.values():
        assert_no_near_ties(family_model, memory, ROWS)
    return result


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor = ROWS) -> Tensor:
    return model(ids, use_cache=False).logits


def one_by_one(model: PreTrainedModel, memories: dict[str, RoutingMemory]) -> dict[str, Tensor]:
    """What each gives, attached alone."""
    given = {"nobody": read(model)}
    for name, memory in memories.items():
        with attach(model, memory):
            given[name] = read(model)
    return given


def test_one_for_a_call(family_model: PreTrainedModel, memories: dict[str, RoutingMemory]) -> None:
    alone = one_by_one(family_model, memories)
    assert not any(torch.equal(alone["nobody"], alone[name]) for name in NAMES)
    with attach_all(family_model, memories) as routing:
        assert torch.equal(read(family_model), alone["nobody"])
        for name in NAMES:
            with routing.using(name):
                assert torch.equal(read(family_model), alone[name])
                with routing.using(None):
                    assert torch.equal(read(family_model), alone["nobody"])
                assert torch.equal(read(family_model), alone[name])
        assert torch.equal(read(family_model), alone["nobody"])
        stats = routing.stats()
    assert {layer.calls for one in stats.values() for layer in one.values()} == {2}
    assert not any(router.scope._forward_pre_hooks for router in find_routers(family_model))


def test_one_for_each_row(
    family_model: PreTrainedModel, memories: dict[str, RoutingMemory]
) -> None:
    alone = one_by_one(family_model, memories)
    with attach_all(family_model, memories) as routing, routing.using(["law", None, "medicine"]):
        rows = read(family_model)
        stats = routing.stats()
    for row, name in enumerate(("law", "nobody", "medicine")):
        # Experts sum over other tokens than before: the same but for rounding.
        torch.testing.assert_close(rows[row], alone[name][row])
    assert {layer.tokens for one in stats.values() for layer in one.values()} == {9}
    with attach(family_model, memories["law"]) as one:
        read(family_model, ROWS[:1])
        for layer, expected in one.stats().items():
            found = stats["law"][layer]
            assert found.mean_confidence == pytest.approx(expected.mean_confidence)
            assert found.changed == pytest.approx(expected.changed)


def test_generating(family_model: PreTrainedModel, memories: dict[str, RoutingMemory]) -> None:
    """Rows keep their memory while they grow, padded on the left, and when they are repeated."""
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ROWS[:2])
    mask[1, :4] = 0
    inputs = {"input_ids": ROWS[:2] * mask, "attention_mask": mask}
    said = {}
    for name in NAMES:
        with attach(family_model, memories[name]):
            said[name] = family_model.generate(**inputs, **options)
    with attach_all(family_model, memories) as routing, routing.using(["medicine", "law"]):
        both = family_model.generate(**inputs, **options)
        beams = family_model.generate(**inputs, **options, num_beams=2, num_return_sequences=2)
    assert torch.equal(both[0], said["medicine"][0])
    assert torch.equal(both[1], said["law"][1])
    for row, name in enumerate(NAMES):
        with attach(family_model, memories[name]):
            alone = family_model.generate(**inputs, **options, num_beams=2, num_return_sequences=2)
        assert torch.equal(beams[2 * row : 2 * row + 2], alone[2 * row : 2 * row + 2])


@pytest.mark.slow
@pytest.mark.parametrize("family_model", ["olmoe"], indirect=True)
def test_compiled(memories: dict[str, RoutingMemory], family_model: PreTrainedModel) -> None:
    """The choice is no constant of the graph."""
    alone = one_by_one(family_model, memories)
    compiled = torch.compile(family_model, backend="eager")
    with attach_all(family_model, memories) as routing:
        for choice in ("law", None, "medicine", ["law", None, "medicine"], "law"):
            names = choice if isinstance(choice, list) else [choice] * 3
            with routing.using(choice), torch.no_grad():
                rows = compiled(ROWS, use_cache=False).logits
            for row, name in enumerate(names):
                torch.testing.assert_close(rows[row], alone[name or "nobody"][row])
    torch.compiler.reset()


def test_each_is_used_in_its_own_way(
    family_model: PreTrainedModel, memories: dict[str, RoutingMemory]
) -> None:
    last = max(memories["law"].layers)
    config = RoutingConfig(k=3, gamma_scale=0.1, layers=(last,))
    with attach(family_model, memories["law"], config):
        expected = read(family_model)
    with attach_all(family_model, memories, {"law": config}) as routing, routing.using("law"):
        assert torch.equal(read(family_model), expected)
        assert list(routing.stats()["law"]) == [last]


def test_each_is_explained_as_if_it_were_alone(
    family_model: PreTrainedModel, memories: dict[str, RoutingMemory]
) -> None:
    ids = ROWS[0]
    configs = {"law": RoutingConfig(k=3)}
    with attach_all(family_model, memories, configs) as routing, routing.using("medicine"):
        explained = {name: routing.explain(name, ids, last=4) for name in NAMES}
        read(family_model)
        assert {layer.calls for layer in routing.stats()["medicine"].values()} == {1}
        assert {layer.calls for layer in routing.stats()["law"].values()} == {0}
        with pytest.raises(ConfigError, match="Unknown memory 'arts'"):
            routing.explain("arts", ids)
        with pytest.raises(ConfigError, match="last must be at least 1"):
            routing.explain("law", ids, last=0)
    for name in NAMES:
        with attach(family_model, memories[name], configs.get(name)) as alone:
            assert explained[name] == alone.explain(ids, last=4)
    assert explained["law"] != explained["medicine"]


def test_what_is_refused(family_model: PreTrainedModel, memories: dict[str, RoutingMemory]) -> None:
    with pytest.raises(ConfigError, match="at least one memory"):
        attach_all(family_model, {})
    with pytest.raises(ConfigError, match="Unknown memory in configs"):
        attach_all(family_model, memories, {"art": RoutingConfig()})
    manifest = replace(
        memories["law"].manifest,
        base_model=replace(memories["law"].base_model, fingerprint="0" * 64),
    )
    foreign = {**memories, "law": replace(memories["law"], manifest=manifest)}
    with pytest.raises(MemoryMismatchError, match="force"):
        attach_all(family_model, foreign)
    assert not any(router.scope._forward_pre_hooks for router in find_routers(family_model))
    routing = attach_all(family_model, memories)
    with pytest.raises(AttachError, match="attach_all"):
        attach(family_model, memories["law"])
    with pytest.raises(ConfigError, match="Unknown memory 'art'"), routing.using("art"):
        pass
    with pytest.raises(ConfigError, match="empty list"), routing.using([]):
        pass
    assert "attached, medicine, law" in repr(routing)
    routing.detach()
    routing.detach()
    with pytest.raises(AttachError, match="are detached"), routing.using("law"):
        pass


def test_a_memory_that_was_chosen_and_never_asked(
    family_model: PreTrainedModel, memories: dict[str, RoutingMemory]
) -> None:
    with attach_all(family_model, memories) as routing:
        with routing.using("law"), routing.using("medicine"):
            read(family_model)
        with routing.using("law"):
            pass
    assert routing.stats()["law"][max(memories["law"].layers)].calls == 0


@pytest.mark.parametrize("ids", [ROWS, ROWS[:1, :8]])
def test_rows_that_are_not_the_batch_s(
    family_model: PreTrainedModel, memories: dict[str, RoutingMemory], ids: Tensor
) -> None:
    with (
        pytest.raises(ConfigError, match="chosen for 2 rows"),
        attach_all(family_model, memories) as routing,
        routing.using(["law", None]),
    ):
        read(family_model, ids)
    assert not any(router.scope._forward_pre_hooks for router in find_routers(family_model))
