"""Ways to answer: the model alone, kNN-MoE, and the methods it is compared with.

Names are imported when they are first used: the list of methods need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from knn_moe.methods.catalogue import METHODS as METHODS
    from knn_moe.methods.knn_moe import KnnMoe as KnnMoe
    from knn_moe.methods.method import Method as Method
    from knn_moe.methods.method import ZeroShot as ZeroShot
    from knn_moe.methods.registry import PreparedMethod as PreparedMethod
    from knn_moe.methods.registry import check_method as check_method
    from knn_moe.methods.registry import check_model as check_model
    from knn_moe.methods.registry import prepare as prepare
    from knn_moe.methods.registry import prepared_on as prepared_on
    from knn_moe.methods.task_context import TaskContext as TaskContext

_HOMES: Final = {
    "METHODS": "catalogue",
    "KnnMoe": "knn_moe",
    "Method": "method",
    "PreparedMethod": "registry",
    "TaskContext": "task_context",
    "ZeroShot": "method",
    "check_method": "registry",
    "check_model": "registry",
    "prepare": "registry",
    "prepared_on": "registry",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'knn_moe.methods' has no attribute {name!r}")
    return getattr(import_module(f"knn_moe.methods.{_HOMES[name]}"), name)
