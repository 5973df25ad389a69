"""The ends of prompts run again: exactly what the whole model does under the same routing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers.zoo import family
from knn_moe.errors import RouterNotCalledError, UnsupportedModelError
from knn_moe.methods.pathways import Tail, last_layers
from knn_moe.routers.find import find_routers
from knn_moe.routers.intercept import RouterHook
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model
from knn_moe.tasks.likelihood import choice_scores

LENGTHS = (5, 1, 24, 140)  # the last beyond GPT-OSS's window of 128


@pytest.fixture(scope="module", params=EMBEDDED_MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    place = embedded_model(request.param)
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tail(model: PreTrainedModel) -> Tail:
    return last_layers(model, 5)


def words(*lengths: int, seed: int = 0, top: int = 4000) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, top, (length,), generator=draw).tolist() for length in lengths]


def disturbed(own: Tensor) -> Tensor:
    return own + torch.randn(own.shape, generator=torch.Generator().manual_seed(1))


@contextmanager
def routed_at(model: PreTrainedModel, place: int, routing: Tensor) -> Iterator[None]:
    """One sequence without padding or cache: token `place` of it routed by `routing` [L, N]."""
    handles = []
    for router, row in zip(find_routers(model)[-len(routing) :], routing, strict=True):

        def replace(inputs: Tensor, logits: Tensor, row: Tensor = row) -> Tensor:
            return torch.cat([logits[:place], row[None], logits[place + 1 :]])

        handles += RouterHook(router, replace).install()
    yield
    for handle in handles:
        handle.remove()


def slow_logits(
    model: PreTrainedModel, prompt: Sequence[int], more: Sequence[int], routing: Tensor
) -> Tensor:
    """After the prompt and each token of `more`, the whole read anew. Result [1 + len(more), V]."""
    with routed_at(model, len(prompt) - 1, routing):
        output = model(torch.tensor([[*prompt, *more]]), use_cache=False)
    return output.logits[0, len(prompt) - 1 :]


def hooks_on(model: PreTrainedModel) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 1, 4, 3)])
def test_a_run_and_its_gradient_are_those_of_the_whole_model(
    sizes: tuple[int, ...], model: PreTrainedModel, tail: Tail
) -> None:
    prompts, answers = words(*LENGTHS), words(*sizes, seed=2)
    halted = tail.read(prompts, answers)
    assert halted.hidden.shape[:2] == (4, max(sizes))  # what goes through the layers again
    assert len(tail.layers) == 5
    routing = disturbed(halted.own)
    leaf = routing.clone().requires_grad_()
    losses = tail.losses(halted, leaf)
    (slope,) = torch.autograd.grad(losses.sum(), leaf)
    with torch.no_grad():
        found = tail.run(halted, routing)
        own = tail.run(halted, halted.own)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        slow_leaf = routing[row].clone().requires_grad_()
        slow = slow_logits(model, prompt, answer[:-1], slow_leaf)
        loss = F.cross_entropy(slow, torch.tensor(answer))
        (slow_slope,) = torch.autograd.grad(loss, slow_leaf)
        torch.testing.assert_close(found[row, : len(answer)], slow, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(losses[row], loss, atol=1e-5, rtol=0)
        torch.testing.assert_close(slope[row], slow_slope, atol=1e-5, rtol=0)
        assert slope[row].abs().max() > 1e-3
        assert (own[row, 0] - found[row, 0]).abs().max() > 0.1
        with torch.no_grad():
            alone = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(own[row, 0], alone, atol=1e-5, rtol=1e-5)


def test_it_can_be_run_again_and_again(tail: Tail) -> None:
    halted = tail.read(words(7, 3))
    with torch.no_grad():
        first = tail.run(halted, halted.own)
        tail.run(halted, disturbed(halted.own))
        assert torch.equal(tail.run(halted, halted.own), first)
    assert torch.equal(first, halted.logits)


def test_dense_gradients_reach_experts_that_were_not_chosen(model: PreTrainedModel) -> None:
    slopes = {}
    for gradient in ("sparse", "dense"):
        tail = last_layers(model, 2, gradient)
        halted = tail.read(words(6), [[9]])
        leaf = halted.own.clone().requires_grad_()
        (slopes[gradient],) = torch.autograd.grad(tail.losses(halted, leaf).sum(), leaf)
    chosen = halted.own.topk(model.config.num_experts_per_tok).indices
    left = torch.ones_like(leaf, dtype=torch.bool).scatter(-1, chosen, False)
    assert (slopes["dense"][left] != 0).all()
    if type(model).__name__ != "OlmoeForCausalLM":  # its softmax is over all experts
        assert slopes["sparse"][left].abs().max() < 1e-8


def recorded(tail: Tail, run: Any, rows: int) -> Tensor:
    """The last tokens' logits in the first pass `run` makes over all prompts. Result [B, L, N]."""
    seen: list[Tensor] = []
    handles = []
    for router in tail.routers:

        def record(inputs: Tensor, logits: Tensor) -> Tensor:
            seen.append(logits.view(rows, -1, logits.shape[-1])[:, -1])
            return logits

        handles += RouterHook(router, record).install()
    run()
    for handle in handles:
        handle.remove()
    return torch.stack(seen[: len(tail.routers)], dim=1)


def test_a_prompt_routed_as_it_was_is_answered_as_it_was(
    model: PreTrainedModel, tail: Tail
) -> None:
    prompts = words(9, 9, 9)
    asked = torch.tensor(prompts), torch.randint(3, 4000, (3, 2, 4)), torch.ones(3, 2, 4).bool()

    def choose() -> Tensor:
        return choice_scores(model, *asked)[0]

    own = recorded(tail, choose, 3)
    with tail.remixed(prompts, own):
        again = choose()
    with tail.remixed(prompts, disturbed(own)):
        other = choose()
    assert torch.equal(again, choose())
    assert (other - again).abs().min() > 1e-3
    left = {"input_ids": torch.tensor([[0, 0, *prompts[0][:7]], prompts[1]]),
            "attention_mask": torch.tensor([[0, 0] + [1] * 7, [1] * 9])}  # fmt: skip

    def write() -> Tensor:
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        return model.generate(**left, **settings, output_scores=True, return_dict_in_generate=True)

    own = recorded(tail, write, 2)
    with tail.remixed([prompts[0][:7], prompts[1]], own):
        again = write()
    for ours, theirs in zip(again.scores, write().scores, strict=True):
        assert torch.equal(ours, theirs)


def test_choices_are_those_of_a_plain_loop_under_the_same_routing(
    model: PreTrainedModel, tail: Tail
) -> None:
    prompts, options = words(8, 8), torch.tensor(words(*[3] * 6, seed=4)).view(2, 3, 3)
    scored = torch.ones_like(options, dtype=torch.bool)
    scored[:, 1, 2] = False
    routing = disturbed(tail.read(prompts).own)
    with tail.remixed(prompts, routing):
        found, losses = choice_scores(model, torch.tensor(prompts), options, scored)
    for row, prompt in enumerate(prompts):
        for column in range(3):
            ids = options[row, column][scored[row, column]]
            with torch.no_grad():
                slow = slow_logits(model, prompt, ids[:-1].tolist(), routing[row])
            expected = -F.cross_entropy(slow, ids, reduction="sum")
            torch.testing.assert_close(found[row, column], expected, atol=1e-4, rtol=0)
    _, alone = choice_scores(model, torch.tensor(prompts), options, scored)
    torch.testing.assert_close(losses, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [(4, 9), (1, 1)])
def test_what_is_written_is_what_a_prompt_alone_goes_on_with(
    lengths: tuple[int, int], model: PreTrainedModel, tail: Tail
) -> None:
    """Of prompts of one token, too, what is written behind them is routed by the routers."""
    prompts = words(*lengths)
    routing = disturbed(tail.read(prompts).own)
    gap = lengths[1] - lengths[0]
    left = torch.tensor([[0] * gap + prompts[0], prompts[1]])
    mask = torch.tensor([[0] * gap + [1] * lengths[0], [1] * lengths[1]])
    with tail.remixed(prompts, routing):
        written = model.generate(
            left, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0
        )[:, lengths[1] :].tolist()
    for row, prompt in enumerate(prompts):
        more: list[int] = []
        while len(more) < 5 and (not more or more[-1] != model.config.eos_token_id):
            with torch.no_grad():
                more.append(int(slow_logits(model, prompt, more, routing[row])[-1].argmax()))
        assert written[row][: len(more)] == more


def test_where_nothing_is_read_it_is_told_and_no_hook_is_left(
    model: PreTrainedModel, tail: Tail
) -> None:
    prompts = words(4)
    own = tail.read(prompts).own
    others = torch.tensor(words(4, 4, seed=9))
    with pytest.raises(RouterNotCalledError, match="nothing was re-mixed"):  # noqa: SIM117
        with torch.no_grad(), tail.remixed(prompts, own):
            model(others)
    with pytest.raises(ZeroDivisionError), tail.remixed(prompts, own):
        raise ZeroDivisionError
    assert hooks_on(model) == 0


@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen2_moe", "mixtral", "deepseek_v3"])
def test_other_families_are_run_as_exactly(name: str) -> None:
    """Hybrids too, whose choices are read behind their contexts, without a cache."""
    model = family(name)
    tail = last_layers(model, 5)
    prompts = words(6, 6, top=120)
    halted = tail.read(prompts)
    routing = disturbed(halted.own)
    options = torch.tensor(words(*[2] * 4, seed=4, top=120)).view(2, 2, 2)
    with tail.remixed(prompts, routing), torch.no_grad():
        found, _ = choice_scores(model, torch.tensor(prompts), options, options > 0)
    with torch.no_grad():
        again = tail.run(halted, routing)
        for row, prompt in enumerate(prompts):
            for column in range(2):
                ids = options[row, column]
                slow = slow_logits(model, prompt, ids[:1].tolist(), routing[row])
                torch.testing.assert_close(again[row, 0], slow[0], atol=1e-4, rtol=1e-4)
                expected = -F.cross_entropy(slow, ids, reduction="sum")
                torch.testing.assert_close(found[row, column], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["dbrx", "qwen3_next"])
def test_families_that_cannot_be_run_from_the_middle_are_told(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="choose another method"):
        last_layers(family(name), 5)


def test_in_half_precision_it_is_the_same_run() -> None:
    place = embedded_model("tiny-olmoe")
    tail = last_layers(AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).eval(), 5)
    halted = tail.read(words(7, 3), [[5], [6, 7]])
    assert halted.own.dtype == torch.float32
    leaf = halted.own.clone().requires_grad_()
    assert torch.equal(tail.run(halted, leaf), halted.logits)
    (slope,) = torch.autograd.grad(tail.losses(halted, leaf).sum(), leaf)
    assert slope.isfinite().all()
    assert slope.abs().max() > 0
