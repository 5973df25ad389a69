"""The gate: what it turns away is the router's own to the last bit, all else as without it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from helpers.families import FAMILIES, Family
from helpers.near_ties import assert_no_near_ties
from helpers.zoo import BUILD, TEXTS, family
from knn_moe import (
    BuildConfig,
    RoutingConfig,
    RoutingMemory,
    attach,
    build_memory,
    compress,
    find_routers,
)
from knn_moe.errors import ConfigError
from knn_moe.index.fast import launch
from knn_moe.inference.attach import Routing
from knn_moe.inference.gate import Gate, entropy, entropy_threshold
from knn_moe.memory.files import _digest
from knn_moe.memory.layers import LayerMemory
from knn_moe.recall.layer import RouterCall
from knn_moe.routers.find import Router
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.own_logits import compute_own_logits
from knn_moe.support.embedded_models import embedded_model

READ = [
    "The river rose in the night and by morning the lower fields were under water.",
    "A court may set aside the order if the notice was not served in time.",
    "Patients with a fever were given fluids and kept in bed for two days.",
    "She opened the window, and the sound of the harbour came in with the wind.",
]
ASKED = "By morning the order was set aside, and the river came in with the wind and the rain."


@pytest.fixture(scope="module", params=["tiny-olmoe", "tiny-qwen3", "tiny-gpt-oss"])
def trained(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, RoutingMemory, Tensor]:
    """A model, what it remembers of READ, and what it is asked."""
    place = embedded_model(request.param)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(place)
    memory = build_memory(model, tokenizer, READ, BuildConfig(preset="strong"))
    return model, memory, torch.tensor([tokenizer(ASKED)["input_ids"]])


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def gated(memory: RoutingMemory, gate: str | None, share: float = 1 / 3) -> RoutingConfig:
    return replace(memory.routing, gate=gate, gate_share=share)


def by_hand(logits: Tensor) -> Tensor:
    """Entropies, one token after the other, in doubles."""
    chances = [row.double().softmax(dim=-1) for row in logits]
    return torch.stack([-(row * row.log()).sum() for row in chances])


@pytest.mark.parametrize("gate", ["entropy", "confidence"])
def test_a_gate_for_none_and_one_for_all(
    gate: str, trained: tuple[PreTrainedModel, RoutingMemory, Tensor]
) -> None:
    model, memory, ids = trained
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    base = logits_of(model, ids)
    with attach(model, memory, gated(memory, None)) as routing:
        calls = watched(routing, model, ids)
    usual = float(torch.stack([call.confidence for call in calls.values()]).median())
    some = 1 / 3 if gate == "entropy" else usual
    found = {}
    for share in (None, 0.0, some, 1.0):
        config = gated(memory, None) if share is None else gated(memory, gate, share)
        with attach(model, memory, config):
            found[share] = logits_of(model, ids)
    assert torch.equal(found[0.0], found[None])
    assert torch.equal(found[1.0], base)
    between = found[some]
    assert not any(torch.equal(between, other) for other in (base, found[None]))
    assert torch.equal(logits_of(model, ids), base)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def watched(routing: Routing, model: PreTrainedModel, ids: Tensor) -> dict[int, RouterCall]:
    calls: dict[int, RouterCall] = {}
    with routing.observed(lambda call: calls.__setitem__(call.layer, call)):
        logits_of(model, ids)
    return calls


def test_tokens_the_router_is_sure_of_are_its_own(
    trained: tuple[PreTrainedModel, RoutingMemory, Tensor],
) -> None:
    model, memory, ids = trained
    turned_away = 0
    with attach(model, memory, gated(memory, "entropy")) as routing, torch.no_grad():
        calls = watched(routing, model, ids)
        for hook in routing._hooks:
            layer, call = hook.router.layer, calls[hook.router.layer]
            bias = getattr(hook.router.module, "bias", None)
            own = F.linear(call.inputs, hook.router.weight, bias)
            mixed, confidence = call.recall.forward(call.inputs, own)
            known = by_hand(F.linear(memory.layers[layer].keys, hook.router.weight, bias))
            threshold = known.sort().values[round(len(known) / 3) - 1]
            sure = by_hand(own) <= threshold + 1e-5
            used = hook.mix(call.inputs, own)
            assert torch.equal(used[sure], own[sure])
            assert torch.equal(used[~sure], mixed[~sure])
            assert torch.equal(call.confidence, confidence.masked_fill(sure, 0.0))
            assert torch.equal(call.before[sure], call.after[sure])
            turned_away += int(sure.sum())
    assert 0 < turned_away < ids.numel() * len(calls)


def test_tokens_unlike_the_memory_are_the_routers_own(
    trained: tuple[PreTrainedModel, RoutingMemory, Tensor],
) -> None:
    model, memory, ids = trained
    with attach(model, memory, gated(memory, None)) as routing:
        layer, plain = next(iter(watched(routing, model, ids).items()))
    share = float(plain.confidence.median())
    with attach(model, memory, gated(memory, "confidence", share)) as routing:
        call = watched(routing, model, ids)[layer]
    low = plain.confidence <= share
    assert 0 < low.sum() < len(low)
    assert torch.equal(call.confidence, plain.confidence.masked_fill(low, 0.0))
    assert torch.equal(call.after[low], plain.before[low])
    assert torch.equal(call.after[~low], plain.after[~low])


def test_what_is_turned_away_counts_as_such(
    trained: tuple[PreTrainedModel, RoutingMemory, Tensor],
) -> None:
    model, memory, ids = trained
    with attach(model, memory, gated(memory, "entropy")) as routing:
        calls = watched(routing, model, ids)
        stats = routing.stats()
    for layer, call in calls.items():
        assert (stats[layer].calls, stats[layer].tokens) == (1, ids.numel())
        assert stats[layer].mean_confidence == pytest.approx(call.confidence.mean().item())
        changed = (call.before != call.after).any(dim=-1).float().mean().item()
        assert stats[layer].changed == pytest.approx(changed)
    with attach(model, memory, gated(memory, "entropy", 1.0)) as routing:
        logits_of(model, ids)
        assert {(one.mean_confidence, one.changed) for one in routing.stats().values()} == {(0, 0)}


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
def test_kernels_do_not_count_what_is_turned_away(
    zoo_olmoe: PreTrainedModel,
    zoo_memory: RoutingMemory,
    prompt: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of `fast`, by triton's interpreter where there is no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr("knn_moe.recall.layer.kernels_usable", lambda device, k: True)
    monkeypatch.setattr(launch, "_PROGRAMS", 2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = RoutingConfig(k=2, index="fast", layers=(0,), gate="entropy", gate_share=1.0)
    with attach(zoo_olmoe.to(device), zoo_memory, config) as routing:
        call = watched(routing, zoo_olmoe, prompt[:, :4].to(device))[0]
        stats = routing.stats()[0]
    assert call.recall.counts
    assert (stats.calls, stats.tokens, stats.mean_confidence, stats.changed) == (1, 4, 0, 0)


class Recorded(RouterHook):
    """What a router's linear map reads and gives, in a run of the whole model."""

    def __init__(self, router: Router) -> None:
        super().__init__(router, self.record)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def record(self, inputs: Tensor, logits: Tensor) -> Tensor:
        self.seen.append((inputs, logits))
        return logits


@pytest.mark.parametrize("entry", FAMILIES, ids=repr)
def test_own_logits_are_those_of_a_run(entry: Family, prompt: Tensor) -> None:
    """Whatever comes before the linear map in a router, norms and scales among it."""
    model = entry.build().eval()
    hooks = [Recorded(router) for router in find_routers(model)]
    handles = [handle for hook in hooks for handle in hook.install()]
    with torch.no_grad():
        model(prompt, use_cache=False)
        for handle in handles:
            handle.remove()
        for hook in hooks:
            for inputs, logits in hook.seen:
                torch.testing.assert_close(compute_own_logits(hook.router, inputs), logits)
    assert all(hook.seen for hook in hooks)


def test_of_many_cases_some_are_measured(zoo_olmoe: PreTrainedModel) -> None:
    router = find_routers(zoo_olmoe)[0]
    keys = torch.randn(5000, router.hidden_size)
    values = torch.zeros(5000, router.num_experts)
    some = keys[[place * 5000 // 4096 for place in range(4096)]]
    expected = entropy(compute_own_logits(router, some)).sort().values[round(0.25 * 4096) - 1]
    found = entropy_threshold(router, LayerMemory(keys, values, gamma=1.0), 0.25)
    assert found == pytest.approx(expected.item())


def test_an_expert_that_is_certain_or_barred_has_no_entropy() -> None:
    logits = torch.tensor([[0.0, 0, 0, 0], [200, 0, 0, 0], [0, 0, -torch.inf, -torch.inf]])
    expected = torch.tensor([4, 1, 2]).log()
    torch.testing.assert_close(entropy(logits), expected)


def test_the_model_compiles_whole(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor, compiled_state: None
) -> None:
    assert_no_near_ties(zoo_olmoe, zoo_memory, prompt)
    with attach(zoo_olmoe, zoo_memory, gated(zoo_memory, "entropy")), torch.no_grad():
        eager = zoo_olmoe(prompt, use_cache=False).logits
        compiled = torch.compile(zoo_olmoe, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(prompt, use_cache=False).logits, eager)


def test_in_half_precision(zoo_tokenizer: Any, prompt: Tensor) -> None:
    model = family("gpt_oss").bfloat16()
    memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    base = logits_of(model, prompt)
    with attach(model, memory, gated(memory, "entropy", 1.0)):
        assert torch.equal(logits_of(model, prompt), base)
    with attach(model, memory, gated(memory, "entropy")) as routing:
        logits_of(model, prompt)
        assert sum(one.mean_confidence for one in routing.stats().values()) > 0


def test_a_compressed_memory_has_no_keys(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor, tmp_path: Path
) -> None:
    small = compress(zoo_memory, "fast", tmp_path / "small")
    with pytest.raises(ConfigError, match=r"a compressed memory has none\. Attach the full memory"):
        attach(zoo_olmoe, small, gated(small, "entropy"))
    with attach(zoo_olmoe, small, gated(small, "confidence")):
        logits_of(zoo_olmoe, prompt)


def test_a_memory_keeps_its_gate_and_older_ones_have_none(
    zoo_memory: RoutingMemory, tmp_path: Path
) -> None:
    manifest = replace(zoo_memory.manifest, routing=gated(zoo_memory, "entropy", 0.25))
    replace(zoo_memory, manifest=manifest).save_pretrained(tmp_path / "memory")
    assert RoutingMemory.from_pretrained(tmp_path / "memory").routing == manifest.routing
    path = tmp_path / "memory" / "memory_config.json"
    config = json.loads(path.read_text(encoding="utf8"))
    del config["routing"]["gate"], config["routing"]["gate_share"]
    path.write_text(json.dumps({**config, "digest": _digest(config)}), encoding="utf8")
    assert RoutingMemory.from_pretrained(tmp_path / "memory").routing == zoo_memory.routing


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"gate": "luck"}, "Unknown gate 'luck'. Available: entropy, confidence."),
        ({"gate_share": 1.5}, "gate_share must be from 0 to 1, got 1.5."),
        ({"gate_share": float("nan")}, "gate_share must be from 0 to 1, got nan."),
    ],
)
def test_a_wrong_gate_is_told(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RoutingConfig(**wrong)


def test_a_gate_is_no_part_of_a_state() -> None:
    gate = Gate("entropy", 0.5, torch.device("cpu"))
    assert dict(gate.state_dict()) == {}
    assert gate.threshold == 0.5
