"""kNN-MoE: adapt a frozen Mixture-of-Experts language model by recalling better expert choices.

>>> memory = build_memory(model, tokenizer, load_examples("ref.jsonl"), BuildConfig())
>>> with attach(model, memory):
...     model.generate(**inputs)

Names are imported when they are first used: `knn-moe --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knn_moe.build import build_memory
    from knn_moe.calibration import build_calibrated, calibrate
    from knn_moe.compression import compress
    from knn_moe.config import BuildConfig, HeadConfig, RoutingConfig
    from knn_moe.controls import control
    from knn_moe.handle import attach
    from knn_moe.index.settings import IndexConfig
    from knn_moe.labelling import LabelConfig, label
    from knn_moe.memories import attach_all
    from knn_moe.memory import RoutingMemory
    from knn_moe.pruning import prune
    from knn_moe.reference import Example, load_examples
    from knn_moe.routers import find_routers

__all__ = [
    "BuildConfig",
    "Example",
    "HeadConfig",
    "IndexConfig",
    "LabelConfig",
    "RoutingConfig",
    "RoutingMemory",
    "attach",
    "attach_all",
    "build_calibrated",
    "build_memory",
    "calibrate",
    "compress",
    "control",
    "find_routers",
    "label",
    "load_examples",
    "prune",
]
__version__ = "0.1.0"

_HOMES = {
    "BuildConfig": "config",
    "Example": "reference",
    "HeadConfig": "config",
    "IndexConfig": "index.settings",
    "LabelConfig": "labelling",
    "RoutingConfig": "config",
    "RoutingMemory": "memory",
    "attach": "handle",
    "attach_all": "memories",
    "build_calibrated": "calibration",
    "build_memory": "build",
    "calibrate": "calibration",
    "compress": "compression",
    "control": "controls",
    "find_routers": "routers",
    "label": "labelling",
    "load_examples": "reference",
    "prune": "pruning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'knn_moe' has no attribute {name!r}")
    return getattr(import_module(f"knn_moe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
