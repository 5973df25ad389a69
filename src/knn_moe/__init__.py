"""kNN-MoE: adapt a frozen Mixture-of-Experts language model by recalling better expert choices.

>>> memory = build_memory(model, tokenizer, load_examples("ref.jsonl"), BuildConfig())
>>> with attach(model, memory):
...     model.generate(**inputs)
"""

from knn_moe.attach import attach
from knn_moe.build import build_memory
from knn_moe.config import BuildConfig, RoutingConfig
from knn_moe.memory import RoutingMemory
from knn_moe.reference import Example, load_examples
from knn_moe.routers import find_routers

__all__ = [
    "BuildConfig",
    "Example",
    "RoutingConfig",
    "RoutingMemory",
    "attach",
    "build_memory",
    "find_routers",
    "load_examples",
]
__version__ = "0.1.0"
