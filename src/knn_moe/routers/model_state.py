"""A model as it is found: unwrapped, on its devices, frozen for a while, with hooks for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from knn_moe.errors import ModelTooLargeError


class Installable(Protocol):
    """Something that puts hooks on modules."""

    def install(self) -> Sequence[RemovableHandle]: ...


def unwrap(model: nn.Module) -> Any:
    """The model itself, where PEFT or torch.compile has wrapped it."""
    model = getattr(model, "_orig_mod", model)
    base: Any = getattr(model, "get_base_model", None)
    return model if base is None else base()


def run_device(module: nn.Module) -> torch.device:
    """Where a module runs; accelerate keeps offloaded weights on 'meta' until then."""
    weight = next(module.parameters())
    if not weight.is_meta:
        return weight.device
    for part in module.modules():
        for hook in offload_hooks(part):
            if getattr(hook, "execution_device", None) is not None:
                return torch.device(hook.execution_device)
    return weight.device


def positions(model: nn.Module) -> int | None:
    """How many tokens the model can read; None: it does not say."""
    settings: Any = getattr(model, "config", None)
    if hasattr(settings, "get_text_config"):
        settings = settings.get_text_config()
    return getattr(settings, "max_position_embeddings", None)


def input_device(model: nn.Module) -> torch.device:
    """Where token ids go: where the embedding runs."""
    return run_device(unwrap(model).get_input_embeddings())


def offload_hooks(module: nn.Module) -> list[Any]:
    """The hooks accelerate has put on a module."""
    hook: Any = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", (hook,)))


@contextmanager
def install_hooks(hooks: Sequence[Installable]) -> Iterator[None]:
    """Hooks on inside, off outside."""
    handles: list[RemovableHandle] = []
    try:
        for hook in hooks:
            handles += hook.install()
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def freeze(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no weight gradients inside; everything as it was outside."""
    training = {module: module.training for module in model.modules()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval()
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        for module, mode in training.items():
            module.training = mode


def forget_compiled_graphs() -> None:
    """Let torch.compile look again: graphs compiled earlier would go around new hooks.

    There is no way to forget one model's graphs only: every compiled model of this process is
    compiled again when it is next called.
    """
    tracer = sys.modules.get("torch._dynamo.convert_frame")
    # Resetting a compiler that compiled nothing costs seconds of imports.
    if tracer is not None and getattr(getattr(tracer, "input_codes", None), "seen", True):
        torch.compiler.reset()


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's wrapper, which would trace our hooks."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


@contextmanager
def explain_out_of_memory(advice: str) -> Iterator[None]:
    """Raise ModelTooLargeError with `advice` where the code inside runs out of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        exhausted = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not exhausted and "can't allocate memory" not in str(error):
            raise
        raise ModelTooLargeError(advice) from None
