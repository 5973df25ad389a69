"""Memories by vLLM's own adapter protocol: a request's `model` names one, as it names a LoRA.

vLLM's scheduler, API server and model runners carry adapters from the request to the token:
/v1/models, /v1/load_lora_adapter, the prefix cache's keys, --max-loras. Only the worker's manager
is ours: it puts memories behind the routers, where vLLM's wraps every linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from knn_moe.errors import MemoryFormatError
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from knn_moe_vllm.settings import read_settings
from knn_moe_vllm.store import STORE

_WARM_UP = "/not/a/real"  # where vLLM's own warm-up says its adapters are


class MemoryManager:
    """Stands in for LRUCacheWorkerLoRAManager.

    Args:
        capacity: Memories that are kept; the least recently used goes first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pinned: set[int] = set()

    def add_adapter(self, request: LoRARequest) -> bool:
        """Load a memory, unless it is here. What cannot be used is refused, and nothing changes."""
        number, memories = request.lora_int_id, STORE.memories
        if number in memories and not getattr(request, "load_inplace", False):
            memories[number] = memories.pop(number)  # the most recently used is last
            return False
        try:
            placed = STORE.place(request.lora_path)
        except MemoryFormatError as error:
            if Path(request.lora_path).expanduser().exists():
                raise
            # vLLM's API answers 404 to this one.
            raise LoRAAdapterNotFoundError(request.lora_name, request.lora_path) from error
        memories.pop(number, None)
        memories[number] = placed
        self._make_room()
        return True

    def _make_room(self) -> None:
        removable = [number for number in STORE.memories if number not in self.pinned]
        for number in removable[: max(0, len(STORE.memories) - self.capacity)]:
            del STORE.memories[number]

    def set_active_adapters(self, requests: set[LoRARequest], mapping: Any) -> None:
        """Load what is needed, and note whose each token of the next pass is."""
        wanted = [each for each in requests if not each.lora_path.startswith(_WARM_UP)]
        # Those that are here first: they become the most recently used, which are not removed.
        for request in sorted(wanted, key=lambda each: each.lora_int_id not in STORE.memories):
            self.add_adapter(request)
        if mapping is not None:
            STORE.assign(mapping.index_mapping)

    def remove_adapter(self, number: int) -> bool:
        """Forget a memory."""
        self.pinned.discard(number)
        return STORE.memories.pop(number, None) is not None

    def pin_adapter(self, number: int) -> bool:
        """Keep a memory whatever else is used."""
        if number not in STORE.memories:
            return False
        self.pinned.add(number)
        return True

    def list_adapters(self) -> set[int]:
        """Return the numbers of the memories that are here."""
        return set(STORE.memories)

    def remove_all_adapters(self) -> None:
        """Forget all memories that requests name. They are loaded again when they are used."""
        self.pinned.clear()
        STORE.memories.clear()

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        """Do nothing: memories need no warm-up of their own."""
        yield

    def add_dummy_lora(self, request: LoRARequest, rank: int) -> bool:
        """Do nothing, as above."""
        return True

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """Return vLLM's own choice."""
        return default_rank

    def supports_tower_connector_lora(self) -> bool:
        """Memories change the language model only."""
        return False


def install() -> None:
    """Have vLLM's runners use our manager where the server's configuration names the plugin."""
    own = LoRAModelRunnerMixin.load_lora_model
    if hasattr(own, "knn_moe"):
        return

    @wraps(own)
    def load_lora_model(runner: Any, model: Any, vllm_config: Any, device: Any) -> Any:
        if read_settings(vllm_config) is None:
            return own(runner, model, vllm_config, device)
        runner.lora_manager = MemoryManager(vllm_config.lora_config.max_cpu_loras)
        return model

    load_lora_model.knn_moe = True  # type: ignore[attr-defined]
    LoRAModelRunnerMixin.load_lora_model = load_lora_model
