"""Ask a model about its wrappers and devices; freeze it or install hooks for a while."""

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
    """Return the transformers model inside the wrappers of torch.compile and PEFT."""
    model = uncompiled(model)
    base: Any = getattr(model, "get_base_model", None)
    return model if base is None else base()


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's wrapper, which would trace our hooks."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def run_device(module: nn.Module) -> torch.device:
    """Return the device a module runs on, also if accelerate has offloaded its weights."""
    weight = next(module.parameters())
    if not weight.is_meta:
        return weight.device
    for part in module.modules():
        for hook in offload_hooks(part):
            if getattr(hook, "execution_device", None) is not None:
                return torch.device(hook.execution_device)
    return weight.device


def max_positions(model: nn.Module) -> int | None:
    """Return how many tokens the model can read, or None if its config does not say."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def input_device(model: nn.Module) -> torch.device:
    """Return the device for token ids: that of the embedding."""
    return run_device(unwrap(model).get_input_embeddings())


def offload_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that accelerate has put on a module."""
    hook: Any = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", (hook,)))


@contextmanager
def install_hooks(hooks: Sequence[Installable]) -> Iterator[None]:
    """Install the hooks, and remove them on the way out."""
    handles: list[RemovableHandle] = []
    try:
        for hook in hooks:
            handles += hook.install()
        yield
    finally:
        for handle in handles:
            handle.remove()


def remove_hooks(model: nn.Module, owners: Sequence[object]) -> None:
    """Remove the forward hooks of `model` that are methods of `owners`, however many there are.

    Needs no handles: an interrupt may come between a hook's installation and its handle's return.
    """
    owned = {id(owner) for owner in owners}
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if id(getattr(hook, "__self__", None)) in owned:
                    hooks.pop(key, None)
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_always_called.pop(key, None)


@contextmanager
def freeze(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without weight gradients, and back on the way out."""
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
    """Make torch.compile trace again: graphs compiled earlier do not call new hooks.

    torch cannot forget the graphs of one model only: every compiled model of this process is
    compiled again at its next call.
    """
    tracer = sys.modules.get("torch._dynamo.convert_frame")
    # Resetting a compiler that compiled nothing costs seconds of imports.
    if tracer is not None and getattr(getattr(tracer, "input_codes", None), "seen", True):
        torch.compiler.reset()


@contextmanager
def explain_out_of_memory(advice: str) -> Iterator[None]:
    """Raise ModelTooLargeError with `advice` if the code inside runs out of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        exhausted = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not exhausted and "can't allocate memory" not in str(error):
            raise
        raise ModelTooLargeError(advice) from None
