"""What happens when vLLM loads a model: its routers are found, and it tells tokens' positions.

Knows vLLM's model loaders.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from knn_moe.errors import UnsupportedModelError
from torch import nn
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from knn_moe_vllm.settings import Settings, read_settings, records_graphs
from knn_moe_vllm.slots import Slots
from knn_moe_vllm.store import STORE


def install() -> None:
    """Wrap `load_model` of every loader."""
    for loader in {BaseModelLoader, *_LOAD_FORMAT_TO_MODEL_LOADER.values()}:
        own = vars(loader).get("load_model")
        if own is not None and not hasattr(own, "knn_moe"):
            loader.load_model = _with_memories(own)


def _with_memories(load: Any) -> Any:
    @wraps(load)
    def load_model(
        loader: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        settings = read_settings(vllm_config)
        served = model_config is vllm_config.model_config  # and not a model that drafts for it
        if settings is None or STORE.loading or not served:
            return load(loader, vllm_config, model_config, *args, **kwargs)
        # The model is made as without LoRA, so that every MoE kernel will do, and not only those
        # that take LoRA (there are none on a CPU).
        lora, vllm_config.lora_config = vllm_config.lora_config, None
        try:
            with STORE.making_model(
                all_here=vllm_config.parallel_config.pipeline_parallel_size < 2
            ):
                model = load(loader, vllm_config, model_config, *args, **kwargs)
        finally:
            vllm_config.lora_config = lora
        _check_model(model)
        model.register_forward_pre_hook(_begin_pass, with_kwargs=True)
        if lora is not None and records_graphs(vllm_config):
            STORE.slots = _make_slots(vllm_config, settings)
        if settings.memory is not None:
            STORE.usual = STORE.place(settings.memory)
        return model

    load_model.knn_moe = True  # type: ignore[attr-defined]
    return load_model


def _make_slots(vllm_config: Any, settings: Settings) -> Slots:
    """Return room for the memories that one pass may use: requests' own, and the server's."""
    scheduler, compilation = vllm_config.scheduler_config, vllm_config.compilation_config
    return Slots(
        STORE.routers(),
        vllm_config.lora_config.max_loras + 1,
        settings.prototypes,
        max(scheduler.max_num_batched_tokens, *(compilation.cudagraph_capture_sizes or [0])),
        vllm_config.model_config.dtype,
    )


def _begin_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell the positions of the tokens that the model is called with."""
    STORE.begin(kwargs["positions"] if "positions" in kwargs else args[1])


def _check_model(model: nn.Module) -> None:
    """Raise UnsupportedModelError if vLLM runs the model around its routers or its hooks."""
    name = type(model).__name__
    if type(model).__call__ is not nn.Module.__call__:
        raise UnsupportedModelError(
            f"vLLM calls {name} as compiled code that tells nobody the positions of its tokens."
        )
    reached = {id(gate) for gate in STORE.gates.values()}
    for inner, module in model.named_modules():
        gate = getattr(module, "gate", None)
        fused = getattr(module, "_fse_fuse_gate", False)
        if fused and id(gate) in reached:
            raise UnsupportedModelError(
                f"vLLM never calls the router of {inner!r} in {name}: it computes the logits "
                f"together with those of the shared expert. Memories cannot be used with it."
            )
