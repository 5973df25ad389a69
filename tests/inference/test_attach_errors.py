"""Attaching where it cannot work: refused or told, and the model left as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from helpers.zoo import BUILD, TEXTS, family
from knn_moe import RoutingConfig, RoutingMemory, attach, build_memory, find_routers
from knn_moe.errors import (
    AttachError,
    MemoryMismatchError,
    RouterNotCalledError,
    UnsupportedModelError,
)


def test_attaching_twice_is_refused(zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory) -> None:
    with attach(zoo_olmoe, zoo_memory, RoutingConfig(layers=(0,))):
        for layers in ((0,), (1,), None):
            with pytest.raises(AttachError, match="Detach it first"):
                attach(zoo_olmoe, zoo_memory, RoutingConfig(layers=layers))
    with attach(zoo_olmoe, zoo_memory):
        pass


def test_an_error_in_the_block_still_detaches(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    base = zoo_olmoe(prompt, use_cache=False).logits
    with pytest.raises(ZeroDivisionError), attach(zoo_olmoe, zoo_memory):
        raise ZeroDivisionError
    assert torch.equal(zoo_olmoe(prompt, use_cache=False).logits, base)


def test_an_error_inside_the_router_leaves_no_mode_behind(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    from torch.overrides import _len_torch_function_stack

    base = zoo_olmoe(prompt, use_cache=False).logits
    routing = attach(zoo_olmoe, zoo_memory)
    routing._hooks[0].recall.index.keys = torch.zeros(3, 5)
    with pytest.raises(RuntimeError):
        zoo_olmoe(prompt, use_cache=False)
    assert _len_torch_function_stack() == 0
    routing._remove()
    assert torch.equal(zoo_olmoe(prompt, use_cache=False).logits, base)


def test_detaching_twice_is_harmless(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    routing = attach(zoo_olmoe, zoo_memory)
    zoo_olmoe(prompt, use_cache=False)
    routing.detach()
    routing.detach()
    assert "detached" in repr(routing)
    assert routing.stats()[0].calls == 1


def test_another_models_memory_is_refused_by_name(zoo_memory: RoutingMemory) -> None:
    other = family("olmoe")
    with torch.no_grad():
        find_routers(other)[0].weight.mul_(1.5)
    other.config._name_or_path = "somebody/elses-olmoe"
    with pytest.raises(MemoryMismatchError, match=r"OlmoeForCausalLM.*somebody/elses-olmoe"):
        attach(other, zoo_memory)
    with attach(other, zoo_memory, force=True):
        pass
    with pytest.raises(MemoryMismatchError, match=r"32 → 8 .* 32 → 12"):
        attach(family("longcat_flash"), zoo_memory, force=True)


@pytest.mark.parametrize(("name", "target"), [("hunyuan_v1_moe", "wg"), ("llama4_text", "router")])
def test_an_adapter_on_a_routers_linear_map_is_refused(name: str, target: str) -> None:
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(family(name), LoraConfig(r=4, target_modules=[target]))
    with pytest.raises(UnsupportedModelError, match="Merge it first"):
        find_routers(wrapped)
    assert len(find_routers(wrapped.merge_and_unload())) == len(find_routers(family(name)))


class GoesAround(nn.Module):
    """A block that leaves its router out, as a fused kernel might."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, block.experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def test_a_router_that_is_never_called_is_told(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    zoo_olmoe.model.layers[1].mlp = GoesAround(zoo_olmoe.model.layers[1].mlp)
    routing = attach(zoo_olmoe, zoo_memory)
    with pytest.raises(RouterNotCalledError, match=r"model\.layers\.1\.mlp\.gate"):
        zoo_olmoe(prompt, use_cache=False)
    assert "detached" in repr(routing)


@pytest.mark.slow
def test_a_router_that_is_never_called_is_told_of_compiled_models(
    zoo_olmoe: PreTrainedModel,
    zoo_memory: RoutingMemory,
    prompt: torch.Tensor,
    compiled_state: None,
) -> None:
    zoo_olmoe.model.layers[1].mlp = GoesAround(zoo_olmoe.model.layers[1].mlp)
    compiled = torch.compile(zoo_olmoe, backend="eager")
    with pytest.raises(RouterNotCalledError), attach(zoo_olmoe, zoo_memory), torch.no_grad():
        compiled(prompt, use_cache=False)


def test_logits_from_a_fused_kernel_are_told(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: torch.Tensor
) -> None:
    class Fused(type(zoo_olmoe.model.layers[0].mlp.gate)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = hidden_states.reshape(-1, self.hidden_dim) @ self.weight.T
            weights, chosen = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
            return logits, weights, chosen

    zoo_olmoe.model.layers[0].mlp.gate.__class__ = Fused
    with (
        pytest.raises(UnsupportedModelError, match="use_kernels=False"),
        attach(zoo_olmoe, zoo_memory),
    ):
        zoo_olmoe(prompt, use_cache=False)


def test_gpt_oss_in_mxfp4_is_intercepted_in_its_block(
    zoo_tokenizer: object, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real block of transformers' MXFP4 path; only the GPU kernels it calls stand in."""
    from transformers.integrations import mxfp4

    model = family("gpt_oss")
    memory = build_memory(model, zoo_tokenizer, TEXTS, BUILD)
    with attach(model, memory):
        expected = model(prompt, use_cache=False).logits

    class Mxfp4GptOssExperts(nn.Module):
        def __init__(self, experts: nn.Module) -> None:
            super().__init__()
            self.inner = experts

        def forward(self, x: torch.Tensor, routing: object, *_: object, **__: object) -> object:
            return self.inner(x, *routing)

    def routing(logits: torch.Tensor, top_k: int) -> tuple[object, None, None]:
        values, chosen = logits.topk(top_k, dim=-1)
        return (chosen, values.softmax(dim=-1)), None, None

    kernels = SimpleNamespace(routing=SimpleNamespace(routing=routing))
    monkeypatch.setattr(mxfp4, "triton_kernels_hub", kernels, raising=False)
    for layer in model.model.layers:
        experts = Mxfp4GptOssExperts(layer.mlp.experts)
        if hasattr(mxfp4, "Mxfp4GptOssMLP"):
            layer.mlp = mxfp4.Mxfp4GptOssMLP(layer.mlp.router, experts)
        else:
            layer.mlp.experts = experts
            layer.mlp.forward = mxfp4.mlp_forward.__get__(layer.mlp)
    base = model(prompt, use_cache=False).logits
    with attach(model, memory) as attached:
        logits = model(prompt, use_cache=False).logits
        assert attached.stats()[0].changed is not None
    torch.testing.assert_close(logits, expected)
    assert not torch.equal(logits, base)
