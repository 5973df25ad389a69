"""Benchmarks: their rows, how they are asked, and how an answer is judged."""

from knn_moe.tasks.data import TaskData
from knn_moe.tasks.kinds import Choice, Function, Number, Program, Text
from knn_moe.tasks.registry import all_tasks, find_task, open_task
from knn_moe.tasks.sandbox import allow_programs
from knn_moe.tasks.task import Hub, Kind, Task

__all__ = [
    "Choice",
    "Function",
    "Hub",
    "Kind",
    "Number",
    "Program",
    "Task",
    "TaskData",
    "Text",
    "all_tasks",
    "allow_programs",
    "find_task",
    "open_task",
]
