"""The search of `fast` and the mixing, as Triton kernels. The one room that imports triton.

The same whole numbers as index/scan.py, then the arithmetic of grid.py, similarity.py and
mixing.py. No score reaches memory but each list's best few.

Shapes: T queries, L lists, M keys, r dims, N experts, K neighbours. Names in capitals are known
when a kernel is compiled; KP, NP, … are the next powers of two. ASM: kernels may speak PTX. PDL:
they may be launched before the kernel before them is done.
"""

from knn_moe.index.fast.kernels.decode import few, project
from knn_moe.index.fast.kernels.mix import finish, merge
from knn_moe.index.fast.kernels.prefill import queue_up, round_queries, scan_queues
from knn_moe.index.fast.kernels.small_batch import choose, scan_pairs

__all__ = [
    "choose", "few", "finish", "merge", "project", "queue_up", "round_queries", "scan_pairs",
    "scan_queues",
]  # fmt: skip
