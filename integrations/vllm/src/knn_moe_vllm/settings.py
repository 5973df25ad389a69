"""What `--additional-config '{"knn_moe": …}'` says, and what of vLLM cannot be used with it.

Knows vLLM's configuration; nothing of models or memories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from knn_moe.errors import ConfigError
from knn_moe.support.registry import unknown_name

KEY: Final = "knn_moe"


@dataclass(frozen=True)
class Settings:
    """The plugin's part of the server's configuration."""

    memory: str | None = None  # the folder of the memory of all requests that name none
    prototypes: int = 1024  # of a memory's layer at the most, where CUDA graphs are recorded


def read_settings(vllm_config: Any) -> Settings | None:
    """Return the plugin's settings; None: this server does not use it.

    Raises:
        ConfigError: A name or a value is not known, or vLLM runs in a way that is not supported.
    """
    config = vllm_config.additional_config
    given = config.get(KEY) if isinstance(config, Mapping) else None
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f'"{KEY}" must be an object such as {{}}, got {given!r}.')
    names = [field.name for field in fields(Settings)]
    unknown = sorted(given.keys() - set(names))
    if unknown:
        raise ConfigError(unknown_name(f'name in "{KEY}"', unknown[0], names))
    memory = given.get("memory")
    if memory is not None and not isinstance(memory, str):
        raise ConfigError(f'"memory" must be the folder of a memory, got {memory!r}.')
    prototypes = given.get("prototypes", Settings.prototypes)
    if not isinstance(prototypes, int) or prototypes < 1:
        raise ConfigError(f'"prototypes" must be a whole number from 1 on, got {prototypes!r}.')
    _check_passes(vllm_config)
    return Settings(memory, prototypes)


def records_graphs(vllm_config: Any) -> bool:
    """Return whether passes are recorded as CUDA graphs and replayed."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode.name != "NONE"


def _check_passes(vllm_config: Any) -> None:
    """Refuse what gives a router other tokens than those of the batch, in another order."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "use_sequence_parallel_moe", False):
        raise ConfigError(
            "With sequence-parallel MoE a router sees only a part of each batch, so tokens cannot "
            "be told to memories. Run without data parallelism or without --enable-expert-parallel."
        )
    if getattr(parallel, "use_ubatching", False):
        raise ConfigError(
            "With microbatches a router sees only a part of each batch, so tokens cannot be told "
            "to memories. Leave out --enable-dbo and --ubatch-size."
        )
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        raise ConfigError(
            "With fast prefill the last routers see only a part of each batch, so tokens cannot be "
            "told to memories. Leave out --kv-sharing-fast-prefill."
        )
