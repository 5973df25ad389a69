"""Ways to answer: the model alone, with a routing memory, and whatever that is compared with."""

from knn_moe.methods.knn_moe import KnnMoe
from knn_moe.methods.method import Method, ZeroShot
from knn_moe.methods.registry import METHODS, Prepared, method_named, prepare, prepared_on
from knn_moe.methods.task_context import Setting

__all__ = [
    "METHODS",
    "KnnMoe",
    "Method",
    "Prepared",
    "Setting",
    "ZeroShot",
    "method_named",
    "prepare",
    "prepared_on",
]
