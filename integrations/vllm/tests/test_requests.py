"""A memory for each request: every token is answered by its own request's memory and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from knn_moe import HeadConfig, RoutingMemory, attach
from knn_moe.errors import UnsupportedModelError
from knn_moe.recall.layer import LayerRecall
from torch import Tensor
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.v1.core import kv_cache_utils

from compare import TOLERANCE, Reference, ask, chosen, engine
from knn_moe_vllm import store
from knn_moe_vllm.placed import Placed
from made import PROMPTS

NAMES = (None, "A", "B", "C", "D")


@pytest.fixture(scope="module", params=["tiny-olmoe", "tiny-qwen3", "tiny-gpt-oss"])
def expected(request: pytest.FixtureRequest, reference: Callable[[str], Reference]) -> Reference:
    return reference(request.param)


@pytest.fixture(scope="module")
def llm(expected: Reference) -> Iterator[LLM]:
    with engine(
        expected.folder,
        enable_lora=True,
        max_loras=4,
        max_cpu_loras=4,  # fewer than there are memories: some are removed and loaded again
        enable_prefix_caching=True,
        additional_config={"knn_moe": {}},
    ) as llm:
        yield llm


def test_memories_are_interleaved_in_one_batch(llm: LLM, expected: Reference) -> None:
    asked = [(prompt, name) for prompt in PROMPTS for name in NAMES]
    answers = ask(llm, [prompt for prompt, _ in asked], [expected.request(n) for _, n in asked])
    assert len(PROMPTS) == 24
    assert max(len(answer.prompt_token_ids) for answer in answers) > 96  # read in chunks
    for place, name in enumerate(NAMES):
        assert expected.largest_error(answers[place :: len(NAMES)], name) < TOLERANCE, name
    alone = chosen(answers[:: len(NAMES)])
    for place in range(1, len(NAMES)):
        others = chosen(answers[place :: len(NAMES)])
        changed = sum(a != b for a, b in zip(alone, others, strict=True))
        assert changed >= 12, NAMES[place]  # the memories do something


def second_turn(llm: LLM, expected: Reference) -> dict[str | None, float]:
    """Ask each memory the same, then go on from what the model alone answered. Return the largest
    errors of the second answers, by memory."""
    prompts = PROMPTS[-6:]
    first = ask(llm, prompts, [None] * len(prompts))
    more = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in first]
    errors = {}
    for name in NAMES[:3]:
        for prompt in prompts:  # what the second turn begins with is in the cache
            ask(llm, [prompt], [expected.request(name)])
        answers = ask(llm, more, [expected.request(name)] * len(more))
        assert sum(answer.num_cached_tokens for answer in answers) > 0
        errors[name] = expected.largest_error(answers, name)
    return errors


def test_a_second_turn_goes_on_from_the_prefix_cache(llm: LLM, expected: Reference) -> None:
    assert max(second_turn(llm, expected).values()) < TOLERANCE


def test_without_the_salt_the_cache_would_mix_memories(
    llm: LLM, expected: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm.reset_prefix_cache()
    monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda request: [])
    errors = second_turn(llm, expected)
    assert errors[None] < TOLERANCE
    assert max(errors.values()) > TOLERANCE
    assert llm.reset_prefix_cache()


def test_first_tokens_are_told_by_their_position(
    llm: LLM, expected: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A and C leave the first token of a sequence to the router."""
    place = store.Store.place

    def forget(self: store.Store, folder: str) -> Placed:
        return replace(place(self, folder), spares_first=False)

    llm.llm_engine.remove_lora(expected.request("A").lora_int_id)
    monkeypatch.setattr(store.Store, "place", forget)
    assert llm.reset_prefix_cache()
    answers = ask(llm, PROMPTS, [expected.request("A")] * len(PROMPTS))
    assert expected.largest_error(answers, "A") > TOLERANCE
    llm.llm_engine.remove_lora(expected.request("A").lora_int_id)
    assert llm.reset_prefix_cache()


def test_fast_memories_recall_what_they_recall_in_transformers(
    llm: LLM, expected: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the inputs of a router agree to 1e-4, so do its mixed logits to 1e-2."""
    recall, calls = LayerRecall.forward, {}

    def record(self: LayerRecall, inputs: Tensor, logits: Tensor, *args: Any) -> Any:
        mixed, confidence = recall(self, inputs, logits, *args)
        calls.setdefault(self, []).append(torch.cat([inputs, mixed], dim=-1).clone())
        return mixed, confidence

    monkeypatch.setattr(LayerRecall, "forward", record)
    answers = []
    for prompt in PROMPTS:  # one after the other, so that tokens come in the same order
        answers += ask(llm, [prompt], [expected.request("fast")])
    served = [torch.cat(each) for each in calls.values()]
    calls.clear()
    with attach(expected.model, expected.memories["fast"]), torch.no_grad():
        for answer in answers:
            tokens = [*answer.prompt_token_ids, *answer.outputs[0].token_ids[:-1]]
            expected.model(torch.tensor([tokens]))
    attached = [torch.cat(each) for each in calls.values()]
    width = expected.model.config.hidden_size
    far = torch.cat([(a - b).abs() for a, b in zip(served, attached, strict=True)])
    agree = far[:, :width].amax(dim=-1) < 1e-4
    assert agree.float().mean() > 0.9
    assert (far[agree, width:].amax(dim=-1) < 1e-2).float().mean() >= 0.999


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("with a head", "has a language-model head, and vLLM has no place"),
        ("of another model", "was built for 'another'.*the model that is served has other routers"),
        ("missing", "No adapter found for"),
        ("damaged", "is damaged"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    llm: LLM, expected: Reference, tmp_path: Path, memory: str, message: str
) -> None:
    opened = RoutingMemory.from_pretrained(expected.memories["C"])
    routing = replace(opened.routing, head=HeadConfig())
    other = replace(opened.base_model, name="another", fingerprint="0" * 64)
    folder = tmp_path / "memory"
    if memory == "with a head":
        replace(opened, manifest=replace(opened.manifest, routing=routing)).save_pretrained(folder)
    elif memory == "of another model":
        replace(opened, manifest=replace(opened.manifest, base_model=other)).save_pretrained(folder)
    elif memory == "damaged":
        opened.save_pretrained(folder)
        (folder / "memory_config.json").write_text("{")
    before = llm.llm_engine.list_loras()
    with pytest.raises(Exception, match=message):
        llm.llm_engine.add_lora(LoRARequest("refused", 99, str(folder)))
    assert llm.llm_engine.list_loras() == before
    assert expected.largest_error(ask(llm, PROMPTS[:2], [None] * 2), None) < TOLERANCE


def test_a_quantised_router_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.STORE, "loading", True)
    quantised = SimpleNamespace(
        get_quant_method=lambda layer, prefix: Quantised(), online_quantization_config=None
    )
    with (
        set_current_vllm_config(llm.llm_engine.vllm_config),
        pytest.raises(UnsupportedModelError, match=r"'layers.0.gate' is quantised \(Quantised\)"),
    ):
        GateLinear(8, 4, quant_config=quantised, prefix="layers.0.gate")


class Quantised(LinearMethodBase):
    """A method that is not UnquantizedLinearMethod."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        layer.weight = torch.nn.Parameter(torch.zeros(4, 8))

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
