"""A smaller memory that is worth as much: which cases other examples gain from."""

from knn_moe.pruning.choose import prune

__all__ = ["prune"]
