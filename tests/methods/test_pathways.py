"""Resuming paused prompts gives what the whole model gives with the same routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from helpers.slow_pathways import count_hooks, slow_logits
from helpers.tiny import trained
from helpers.zoo import family
from knn_moe.errors import RouterNotCalledError, UnsupportedModelError
from knn_moe.methods.pathways import LastLayers, find_last_layers
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks
from knn_moe.support.embedded_models import EMBEDDED_MODELS
from knn_moe.tasks.likelihood import choice_scores

LENGTHS = (5, 1, 24, 140)  # the last beyond GPT-OSS's window of 128


@pytest.fixture(scope="module", params=EMBEDDED_MODELS)
def each_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """In float64, so that how a CPU rounds is far below the tolerances."""
    model = trained(request.param, torch.float64)
    model.set_experts_implementation("eager")
    return model


@pytest.fixture(scope="module")
def layers(each_model: PreTrainedModel) -> LastLayers:
    return find_last_layers(each_model, 5)


@pytest.fixture(scope="module")
def olmoe_layers(tiny_olmoe: PreTrainedModel) -> LastLayers:
    return find_last_layers(tiny_olmoe, 5)


def random_ids(*lengths: int, seed: int = 0, top: int = 4000) -> list[list[int]]:
    """Return prompts of these lengths, of tokens below `top`."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, top, (length,), generator=draw).tolist() for length in lengths]


def disturb(own: Tensor) -> Tensor:
    """Return routing logits with noise added."""
    return own + torch.randn(own.shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 4, 3)])
def test_a_run_and_its_gradient_are_those_of_the_whole_model(
    sizes: tuple[int, ...], each_model: PreTrainedModel, layers: LastLayers
) -> None:
    prompts, answers = random_ids(*LENGTHS), random_ids(*sizes, seed=2)
    paused = layers.read(prompts, answers)
    assert paused.hidden.shape[:2] == (4, max(sizes))  # what goes through the layers again
    assert len(layers.layers) == 5
    routing = disturb(paused.own_routing)
    leaf = routing.clone().requires_grad_()
    losses = layers.answer_losses(paused, leaf)
    (slope,) = torch.autograd.grad(losses.sum(), leaf)
    with torch.no_grad():
        found = layers.resume(paused, routing)
        own = layers.resume(paused, paused.own_routing)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        slow_leaf = routing[row].clone().requires_grad_()
        slow = slow_logits(each_model, prompt, answer[:-1], slow_leaf)
        loss = F.cross_entropy(slow, torch.tensor(answer))
        (slow_slope,) = torch.autograd.grad(loss, slow_leaf)
        torch.testing.assert_close(found[row, : len(answer)], slow, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(losses[row], loss.float(), atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(slope[row], slow_slope, atol=1e-5, rtol=0)
        assert slope[row].abs().max() > 1e-3
        assert (own[row, 0] - found[row, 0]).abs().max() > 0.1
        with torch.no_grad():
            alone = each_model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(own[row, 0], alone, atol=1e-5, rtol=1e-5)


def test_resuming_does_not_change_paused_prompts(olmoe_layers: LastLayers) -> None:
    paused = olmoe_layers.read(random_ids(7, 3))
    with torch.no_grad():
        first = olmoe_layers.resume(paused, paused.own_routing)
        olmoe_layers.resume(paused, disturb(paused.own_routing))
        assert torch.equal(olmoe_layers.resume(paused, paused.own_routing), first)
    assert torch.equal(first, paused.logits)


def test_dense_gradients_reach_experts_that_were_not_chosen(each_model: PreTrainedModel) -> None:
    slopes = {}
    for gradient in ("sparse", "dense"):
        layers = find_last_layers(each_model, 2, gradient)
        paused = layers.read(random_ids(6), [[9]])
        leaf = paused.own_routing.clone().requires_grad_()
        (slopes[gradient],) = torch.autograd.grad(layers.answer_losses(paused, leaf).sum(), leaf)
    chosen = paused.own_routing.topk(each_model.config.num_experts_per_tok).indices
    left = torch.ones_like(leaf, dtype=torch.bool).scatter(-1, chosen, False)
    assert (slopes["dense"][left] != 0).all()
    if type(each_model).__name__ != "OlmoeForCausalLM":  # its softmax is over all experts
        assert slopes["sparse"][left].abs().max() < 1e-8


def record_routing(layers: LastLayers, run: Any, rows: int) -> Tensor:
    """Return the last tokens' logits [B, L, N] in the first forward pass of `run`."""
    seen: list[Tensor] = []

    def record(inputs: Tensor, logits: Tensor) -> Tensor:
        seen.append(logits.view(rows, -1, logits.shape[-1])[:, -1])
        return logits

    with install_hooks([RouterHook(router, record) for router in layers.routers]):
        run()
    return torch.stack(seen[: len(layers.routers)], dim=1)


@pytest.mark.slow
def test_a_prompts_own_routing_gives_the_same_answer(
    each_model: PreTrainedModel, layers: LastLayers
) -> None:
    prompts = random_ids(9, 9, 9)
    asked = torch.tensor(prompts), torch.randint(3, 4000, (3, 2, 4)), torch.ones(3, 2, 4).bool()

    def choose() -> Tensor:
        return choice_scores(each_model, *asked)[0]

    own = record_routing(layers, choose, 3)
    with layers.replace_routing(prompts, own):
        again = choose()
    with layers.replace_routing(prompts, disturb(own)):
        other = choose()
    assert torch.equal(again, choose())
    assert (other - again).abs().min() > 1e-3
    left = {"input_ids": torch.tensor([[0, 0, *prompts[0][:7]], prompts[1]]),
            "attention_mask": torch.tensor([[0, 0] + [1] * 7, [1] * 9])}  # fmt: skip

    def write() -> Tensor:
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        return each_model.generate(
            **left, **settings, output_scores=True, return_dict_in_generate=True
        )

    own = record_routing(layers, write, 2)
    with layers.replace_routing([prompts[0][:7], prompts[1]], own):
        again = write()
    for ours, theirs in zip(again.scores, write().scores, strict=True):
        assert torch.equal(ours, theirs)


def test_choice_scores_equal_a_plain_loop_with_the_same_routing(
    tiny_olmoe: PreTrainedModel, olmoe_layers: LastLayers
) -> None:
    prompts, options = random_ids(8, 8), torch.tensor(random_ids(*[3] * 6, seed=4)).view(2, 3, 3)
    scored = torch.ones_like(options, dtype=torch.bool)
    scored[:, 1, 2] = False
    routing = disturb(olmoe_layers.read(prompts).own_routing)
    with olmoe_layers.replace_routing(prompts, routing):
        found, losses = choice_scores(tiny_olmoe, torch.tensor(prompts), options, scored)
    for row, prompt in enumerate(prompts):
        for column in range(3):
            ids = options[row, column][scored[row, column]]
            with torch.no_grad():
                slow = slow_logits(tiny_olmoe, prompt, ids[:-1].tolist(), routing[row])
            expected = -F.cross_entropy(slow, ids, reduction="sum")
            torch.testing.assert_close(found[row, column], expected, atol=1e-4, rtol=0)
    _, alone = choice_scores(tiny_olmoe, torch.tensor(prompts), options, scored)
    torch.testing.assert_close(losses, alone, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(4, 9), (1, 1)])
def test_generation_equals_a_plain_loop_with_the_same_routing(
    lengths: tuple[int, int], each_model: PreTrainedModel, layers: LastLayers
) -> None:
    """Generated tokens are routed by the routers, also after prompts of one token."""
    prompts = random_ids(*lengths)
    routing = disturb(layers.read(prompts).own_routing)
    gap = lengths[1] - lengths[0]
    left = torch.tensor([[0] * gap + prompts[0], prompts[1]])
    mask = torch.tensor([[0] * gap + [1] * lengths[0], [1] * lengths[1]])
    with layers.replace_routing(prompts, routing):
        written = each_model.generate(
            left, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0
        )[:, lengths[1] :].tolist()
    for row, prompt in enumerate(prompts):
        more: list[int] = []
        while len(more) < 5 and (not more or more[-1] != each_model.config.eos_token_id):
            with torch.no_grad():
                more.append(int(slow_logits(each_model, prompt, more, routing[row])[-1].argmax()))
        assert written[row][: len(more)] == more


def test_a_prompt_that_is_never_read_is_an_error_and_no_hook_is_left(
    tiny_olmoe: PreTrainedModel, olmoe_layers: LastLayers
) -> None:
    prompts = random_ids(4)
    own = olmoe_layers.read(prompts).own_routing
    others = torch.tensor(random_ids(4, 4, seed=9))
    with (
        pytest.raises(RouterNotCalledError, match="routing was not replaced"),
        torch.no_grad(),
        olmoe_layers.replace_routing(prompts, own),
    ):
        tiny_olmoe(others)
    with pytest.raises(ZeroDivisionError), olmoe_layers.replace_routing(prompts, own):
        raise ZeroDivisionError
    assert count_hooks(tiny_olmoe) == 0


@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen2_moe", "mixtral", "deepseek_v3"])
def test_other_families_equal_a_plain_loop(name: str) -> None:
    """Also hybrids, whose cache cannot be repeated for the choices."""
    model = family(name)
    layers = find_last_layers(model, 5)
    prompts = random_ids(6, 6, top=120)
    paused = layers.read(prompts)
    routing = disturb(paused.own_routing)
    options = torch.tensor(random_ids(*[2] * 4, seed=4, top=120)).view(2, 2, 2)
    with layers.replace_routing(prompts, routing), torch.no_grad():
        found, _ = choice_scores(model, torch.tensor(prompts), options, options > 0)
    with torch.no_grad():
        again = layers.resume(paused, routing)
        for row, prompt in enumerate(prompts):
            for column in range(2):
                ids = options[row, column]
                slow = slow_logits(model, prompt, ids[:1].tolist(), routing[row])
                torch.testing.assert_close(again[row, 0], slow[0], atol=1e-4, rtol=1e-4)
                expected = -F.cross_entropy(slow, ids, reduction="sum")
                torch.testing.assert_close(found[row, column], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["dbrx", "qwen3_next"])
def test_families_that_cannot_be_resumed_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="Choose another method"):
        find_last_layers(family(name), 5)


def test_half_precision() -> None:
    layers = find_last_layers(trained("tiny-olmoe", torch.bfloat16), 5)
    paused = layers.read(random_ids(7, 3), [[5], [6, 7]])
    assert paused.own_routing.dtype == torch.float32
    leaf = paused.own_routing.clone().requires_grad_()
    assert torch.equal(layers.resume(paused, leaf), paused.logits)
    (slope,) = torch.autograd.grad(layers.answer_losses(paused, leaf).sum(), leaf)
    assert slope.isfinite().all()
    assert slope.abs().max() > 0
