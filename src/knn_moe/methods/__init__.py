"""Ways to answer: the model alone, kNN-MoE, and the methods it is compared with."""

from knn_moe.methods.knn_moe import KnnMoe
from knn_moe.methods.method import Method, ZeroShot
from knn_moe.methods.registry import (
    METHODS,
    PreparedMethod,
    check_method,
    check_model,
    prepare,
    prepared_on,
)
from knn_moe.methods.task_context import TaskContext

__all__ = [
    "METHODS",
    "KnnMoe",
    "Method",
    "PreparedMethod",
    "TaskContext",
    "ZeroShot",
    "check_method",
    "check_model",
    "prepare",
    "prepared_on",
]
