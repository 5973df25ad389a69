"""kNN-MoE: adapt a frozen Mixture-of-Experts language model by recalling better expert choices.

>>> memory = build_memory(model, tokenizer, load_examples("ref.jsonl"), BuildConfig())
>>> with attach(model, memory):
...     model.generate(**inputs)

Names are imported when they are first used: `knn-moe --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from knn_moe.adapt.calibrate.build_calibrated import build_calibrated as build_calibrated
    from knn_moe.adapt.calibrate.calibrate import calibrate as calibrate
    from knn_moe.adapt.compress import compress as compress
    from knn_moe.adapt.controls import control as control
    from knn_moe.adapt.prune.prune import prune as prune
    from knn_moe.build.build import build_memory as build_memory
    from knn_moe.config import BuildConfig as BuildConfig
    from knn_moe.config import HeadConfig as HeadConfig
    from knn_moe.config import IndexConfig as IndexConfig
    from knn_moe.config import RoutingConfig as RoutingConfig
    from knn_moe.errors import KnnMoeError as KnnMoeError
    from knn_moe.inference.attach import attach as attach
    from knn_moe.inference.several import attach_all as attach_all
    from knn_moe.labels.config import LabelConfig as LabelConfig
    from knn_moe.labels.label import label as label
    from knn_moe.memory.memory import RoutingMemory as RoutingMemory
    from knn_moe.reference.examples import Example as Example
    from knn_moe.reference.examples import load_examples as load_examples
    from knn_moe.routers.find import find_routers as find_routers

__version__ = "0.1.0"

# Every public name and the module it lives in.
_HOMES: Final = {
    "BuildConfig": "config",
    "Example": "reference.examples",
    "HeadConfig": "config",
    "IndexConfig": "config",
    "KnnMoeError": "errors",
    "LabelConfig": "labels.config",
    "RoutingConfig": "config",
    "RoutingMemory": "memory.memory",
    "attach": "inference.attach",
    "attach_all": "inference.several",
    "build_calibrated": "adapt.calibrate.build_calibrated",
    "build_memory": "build.build",
    "calibrate": "adapt.calibrate.calibrate",
    "compress": "adapt.compress",
    "control": "adapt.controls",
    "find_routers": "routers.find",
    "label": "labels.label",
    "load_examples": "reference.examples",
    "prune": "adapt.prune.prune",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'knn_moe' has no attribute {name!r}")
    return getattr(import_module(f"knn_moe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
