"""Whether a memory belongs to the routers that a process has: of all layers, or of some.

Knows knn_moe's fingerprints. A process of a pipeline has some layers only and checks those.
"""

from __future__ import annotations

from dataclasses import replace

from knn_moe import RoutingConfig, RoutingMemory
from knn_moe.errors import ConfigError, MemoryMismatchError
from knn_moe.routers.find import Router
from knn_moe.routers.fingerprint import fingerprint, layer_digests, matches_sketch


def check_belongs(memory: RoutingMemory, routers: list[Router], *, all_here: bool) -> None:
    """Raise MemoryMismatchError if `memory` was built for another model.

    Args:
        memory: The memory.
        routers: The routers of this process, in the order of their layers.
        all_here: Whether these are all routers of the model.
    """
    if all_here:
        same = fingerprint(routers) == memory.base_model.fingerprint
        same = same or matches_sketch(memory.manifest.router_sketch, routers)
        wrong = [] if same else [router.layer for router in routers]
    else:
        digests = memory.manifest.router_digests
        if digests is None:
            raise MemoryMismatchError(
                "This memory was built by a version that kept no digest of each layer, so a "
                "process with some layers cannot check it. Build it again, or serve it without "
                "--pipeline-parallel-size."
            )
        wrong = [
            int(layer)
            for layer, digest in layer_digests(routers).items()
            if digests.get(layer) != digest
        ]
    if wrong:
        raise MemoryMismatchError(
            f"This memory was built for {memory.base_model}, and the model that is served has "
            f"other routers (layer {wrong[0]} differs). Build a memory for this model."
        )


def usable_config(memory: RoutingMemory) -> RoutingConfig:
    """Return how the memory is used.

    Raises:
        ConfigError: It has a language-model head.
    """
    config = memory.routing
    if config.head is not None:
        raise ConfigError(
            "This memory has a language-model head, and vLLM has no place to mix next tokens in. "
            "Calibrate it without --head, or serve it with `knn-moe serve`."
        )
    return replace(config, stats=False)
