"""Attached models in real programs: Ctrl-C, threads, asyncio, copies."""

from __future__ import annotations

import asyncio
import copy
import io
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.zoo import BUILD, make_texts
from knn_moe import (
    HeadConfig,
    RoutingConfig,
    RoutingMemory,
    attach,
    attach_all,
    build_memory,
    find_routers,
)
from knn_moe.errors import AttachError
from knn_moe.inference.several import Memories

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def read(model: PreTrainedModel) -> Tensor:
    return model(IDS, use_cache=False).logits


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what `work` returns or raises in another thread."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def hook_count(model: torch.nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


@pytest.fixture
def other_memory(zoo_olmoe: PreTrainedModel, zoo_tokenizer: object) -> RoutingMemory:
    return build_memory(zoo_olmoe, zoo_tokenizer, make_texts(12, seed=7), BUILD)


@pytest.fixture
def alone(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, other_memory: RoutingMemory
) -> dict[str | None, Tensor]:
    """What the model says alone, and with each memory."""
    said: dict[str | None, Tensor] = {None: read(zoo_olmoe)}
    for name, memory in (("one", zoo_memory), ("other", other_memory)):
        with attach(zoo_olmoe, memory):
            said[name] = read(zoo_olmoe)
    assert len({tuple(logits.flatten().tolist()) for logits in said.values()}) == 3
    return said


@pytest.fixture
def routing(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, other_memory: RoutingMemory
) -> Memories:
    return attach_all(zoo_olmoe, {"one": zoo_memory, "other": other_memory})


@pytest.mark.parametrize("where", ["router", "experts", "between", "output"])
def test_an_interrupted_pass_leaves_nothing(
    where: str, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    base, hooks = read(zoo_olmoe), hook_count(zoo_olmoe)
    with attach(zoo_olmoe, zoo_memory):
        recalled = read(zoo_olmoe)
    layer = zoo_olmoe.model.layers[1]
    modules = layer.mlp.gate, layer.mlp.experts, layer.mlp, zoo_olmoe.lm_head
    module = dict(zip(("router", "experts", "between", "output"), modules, strict=True))[where]
    routing = attach(zoo_olmoe, zoo_memory, RoutingConfig(head=HeadConfig(k=4, weight=0.3)))
    handle = module.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        read(zoo_olmoe)
    handle.remove()
    assert torch._C._len_torch_function_stack() == 0
    routing.detach()
    assert hook_count(zoo_olmoe) == hooks
    assert torch.equal(read(zoo_olmoe), base)
    with attach(zoo_olmoe, zoo_memory):
        assert torch.equal(read(zoo_olmoe), recalled)


@pytest.mark.parametrize("where", ["experts", "output"])
def test_a_pass_that_failed_in_a_living_thread_does_not_keep_hooks(
    where: str, zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    hooks = hook_count(zoo_olmoe)
    module = zoo_olmoe.lm_head if where == "output" else zoo_olmoe.model.layers[1].mlp.experts
    routing = attach(zoo_olmoe, zoo_memory, RoutingConfig(head=HeadConfig(k=4, weight=0.3)))

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with ThreadPoolExecutor(1) as pool:
        pool.submit(zoo_olmoe.model, IDS).result()  # the stack alone, without the head
        handle = module.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            pool.submit(read, zoo_olmoe).result()
        handle.remove()
        routing.detach()
        assert hook_count(zoo_olmoe) == hooks
        copy.deepcopy(zoo_olmoe)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_block_called_by_itself_uses_the_choice_of_now(
    error: type[BaseException], zoo_olmoe: PreTrainedModel, routing: Memories
) -> None:
    block, inputs = zoo_olmoe.model.layers[0].mlp, torch.randn(1, 5, zoo_olmoe.config.hidden_size)

    def fail(*_: object) -> None:
        raise error

    with routing, torch.no_grad():
        with routing.using("other"):
            expected = block(inputs)
        handle = zoo_olmoe.model.layers[1].register_forward_hook(fail)
        with routing.using("one"), pytest.raises(error):
            read(zoo_olmoe)
        handle.remove()
        with routing.using("other"):
            assert torch.equal(block(inputs)[0], expected[0])


def test_an_interrupted_attach_leaves_no_hook(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = hook_count(zoo_olmoe)
    last = find_routers(zoo_olmoe)[-1].module
    register = last.register_forward_hook

    def interrupted(*args: Any, **kwargs: Any) -> None:
        register(*args, **kwargs)  # the hook is on, and its handle is lost
        raise KeyboardInterrupt

    monkeypatch.setattr(last, "register_forward_hook", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attach(zoo_olmoe, zoo_memory)
    assert hook_count(zoo_olmoe) == hooks


def test_each_thread_has_its_own_choice(
    zoo_olmoe: PreTrainedModel, alone: dict[str | None, Tensor], routing: Memories
) -> None:
    def read_other() -> Tensor:
        with routing.using("other"):
            return read(zoo_olmoe)

    with routing:
        with routing.using("one"):
            assert torch.equal(in_thread(read_other), alone["other"])
            assert torch.equal(read(zoo_olmoe), alone["one"])
        assert torch.equal(read(zoo_olmoe), alone[None])


def test_a_thread_that_chose_nothing_is_refused(
    zoo_olmoe: PreTrainedModel, routing: Memories
) -> None:
    with routing, routing.using("one"):
        error = in_thread(lambda: read(zoo_olmoe))
        assert isinstance(error, AttachError)
        assert "enter routing.using(…) in the thread that calls the model" in str(error)


def test_tasks_that_take_turns_keep_their_choices(
    zoo_olmoe: PreTrainedModel, alone: dict[str | None, Tensor], routing: Memories
) -> None:
    async def answer(name: str) -> Tensor:
        with routing.using(name):
            await asyncio.sleep(0)  # the others choose now
            return await asyncio.to_thread(read, zoo_olmoe)

    async def serve() -> list[Tensor]:
        return list(await asyncio.gather(*(answer(name) for name in ("one", "other", "one"))))

    with routing:
        answers = asyncio.run(serve())
    for name, logits in zip(("one", "other", "one"), answers, strict=True):
        assert torch.equal(logits, alone[name])


def test_a_task_that_outlives_its_choice_is_refused(
    zoo_olmoe: PreTrainedModel, routing: Memories
) -> None:
    async def serve() -> None:
        async def late() -> None:
            read(zoo_olmoe)

        with routing.using("one"):
            task = asyncio.ensure_future(late())
        await task

    with routing, pytest.raises(AttachError, match="No memory is chosen"):
        asyncio.run(serve())


def test_a_pass_that_is_running_ends_as_it_began(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, alone: dict[str | None, Tensor]
) -> None:
    hooks = hook_count(zoo_olmoe)
    routing = attach(zoo_olmoe, zoo_memory)
    once = threading.Lock()

    def detach(*_: object) -> None:
        if once.acquire(blocking=False):
            in_thread(routing.detach)

    handle = zoo_olmoe.model.layers[0].register_forward_hook(detach)
    assert torch.equal(read(zoo_olmoe), alone["one"])
    handle.remove()
    assert hook_count(zoo_olmoe) == hooks
    assert torch.equal(read(zoo_olmoe), alone[None])


def test_a_model_is_free_while_a_pass_of_a_detached_memory_is_interrupted(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, alone: dict[str | None, Tensor]
) -> None:
    hooks = hook_count(zoo_olmoe)
    routing = attach(zoo_olmoe, zoo_memory)

    def interrupt(*_: object) -> None:
        in_thread(routing.detach)
        raise KeyboardInterrupt

    handle = zoo_olmoe.model.layers[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        read(zoo_olmoe)
    handle.remove()
    with attach(zoo_olmoe, zoo_memory):
        assert torch.equal(read(zoo_olmoe), alone["one"])
    assert torch.equal(read(zoo_olmoe), alone[None])
    assert hook_count(zoo_olmoe) == hooks


def test_an_attached_model_is_not_copied(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory
) -> None:
    with attach(zoo_olmoe, zoo_memory):
        for copies in (
            copy.deepcopy,
            pickle.dumps,
            lambda model: torch.save(model, io.BytesIO()),
        ):
            with pytest.raises(AttachError, match="Detach the memory first"):
                copies(zoo_olmoe)
        torch.save(zoo_olmoe.state_dict(), io.BytesIO())
    assert torch.equal(read(copy.deepcopy(zoo_olmoe)), read(zoo_olmoe))
