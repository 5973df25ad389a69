"""kNN-MoE: adapt a frozen Mixture-of-Experts language model by recalling better expert choices.

>>> model, tokenizer = load_model("tiny-olmoe")
>>> memory = build_memory(model, tokenizer, "ref.jsonl")
>>> with attach(model, memory):
...     model.generate(**inputs)

Names are imported when they are first used: `knn-moe --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from knn_moe.adapt.calibrate.build_calibrated import build_calibrated as build_calibrated
    from knn_moe.adapt.calibrate.calibrate import calibrate as calibrate
    from knn_moe.adapt.calibrate.result import Calibration as Calibration
    from knn_moe.adapt.compress import compress as compress
    from knn_moe.adapt.controls import control as control
    from knn_moe.adapt.distil.distil import build_distilled as build_distilled
    from knn_moe.adapt.distil.distil import distil as distil
    from knn_moe.adapt.distil.result import Distillation as Distillation
    from knn_moe.adapt.prune.prune import prune as prune
    from knn_moe.build.build import build_memory as build_memory
    from knn_moe.config import BuildConfig as BuildConfig
    from knn_moe.config import CalibrationConfig as CalibrationConfig
    from knn_moe.config import DistilConfig as DistilConfig
    from knn_moe.config import HeadConfig as HeadConfig
    from knn_moe.config import IndexConfig as IndexConfig
    from knn_moe.config import LayerRouting as LayerRouting
    from knn_moe.config import RoutingConfig as RoutingConfig
    from knn_moe.errors import KnnMoeError as KnnMoeError
    from knn_moe.evaluation.compare import compare_runs as compare_runs
    from knn_moe.evaluation.evaluate import EvalConfig as EvalConfig
    from knn_moe.evaluation.evaluate import evaluate as evaluate
    from knn_moe.explain.explanation import Explanation as Explanation
    from knn_moe.inference.attach import Routing as Routing
    from knn_moe.inference.attach import attach as attach
    from knn_moe.inference.handle import detach as detach
    from knn_moe.inference.several import Memories as Memories
    from knn_moe.inference.several import attach_all as attach_all
    from knn_moe.labels.config import LabelConfig as LabelConfig
    from knn_moe.labels.label import label as label
    from knn_moe.memory.memory import RoutingMemory as RoutingMemory
    from knn_moe.reference.examples import Example as Example
    from knn_moe.reference.load import load_examples as load_examples
    from knn_moe.routers.find import find_routers as find_routers
    from knn_moe.routers.load import load_model as load_model

__version__ = "0.1.0"

# Every public name and the module it lives in.
_HOMES: Final = {
    "BuildConfig": "config",
    "Calibration": "adapt.calibrate.result",
    "CalibrationConfig": "config",
    "DistilConfig": "config",
    "Distillation": "adapt.distil.result",
    "EvalConfig": "evaluation.evaluate",
    "Example": "reference.examples",
    "Explanation": "explain.explanation",
    "HeadConfig": "config",
    "IndexConfig": "config",
    "KnnMoeError": "errors",
    "LabelConfig": "labels.config",
    "LayerRouting": "config",
    "Memories": "inference.several",
    "Routing": "inference.attach",
    "RoutingConfig": "config",
    "RoutingMemory": "memory.memory",
    "attach": "inference.attach",
    "attach_all": "inference.several",
    "build_calibrated": "adapt.calibrate.build_calibrated",
    "build_distilled": "adapt.distil.distil",
    "build_memory": "build.build",
    "calibrate": "adapt.calibrate.calibrate",
    "compare_runs": "evaluation.compare",
    "compress": "adapt.compress",
    "control": "adapt.controls",
    "detach": "inference.handle",
    "distil": "adapt.distil.distil",
    "evaluate": "evaluation.evaluate",
    "find_routers": "routers.find",
    "label": "labels.label",
    "load_examples": "reference.load",
    "load_model": "routers.load",
    "prune": "adapt.prune.prune",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'knn_moe' has no attribute {name!r}")
    return getattr(import_module(f"knn_moe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
