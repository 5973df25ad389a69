"""The search of `fast` and the mixing (§4.2) as Triton kernels.

Each size of a batch has its own kernels: decode.py, small_batch.py and prefill.py. scan.py and
mix.py hold what they share. All of them compute the whole numbers of index/fast/scan.py, then
the arithmetic of index/fast/grid.py and of equations/. Tests compare them with FastIndex.estimate,
PackedValues.at and mix_logits. Only each list's best estimates reach memory.

Shapes: T queries, L lists, M keys, D input width, R dimensions of a code, N experts, K neighbours.
Names in capitals are known when a kernel is compiled:

KP, PP, LP, DP, RP, NP    the powers of two from K, PROBES, L, D, R and N up
WP                        the power of two from the 32-bit words of a code up
FOUND                     the power of two from PROBES · KP up
BITS, VALUE_BITS          4 or 8 bits for a coordinate of a key, for an expert's value
COSINE                    1: cosine similarity, 0: RBF
TOP                       experts that the router chooses, to count changed choices; 0: do not count
MASKED                    1: `real` says which queries are no padding
ASM                       1: kernels may contain PTX
PDL                       1: they may be launched before the previous kernel has ended
"""

from knn_moe.index.fast.kernels.decode import decode_project, decode_recall
from knn_moe.index.fast.kernels.mix import merge_found, mix_found
from knn_moe.index.fast.kernels.prefill import queue_up, round_queries, scan_queues
from knn_moe.index.fast.kernels.small_batch import choose_lists, scan_pairs

__all__ = [
    "choose_lists", "decode_project", "decode_recall", "merge_found", "mix_found", "queue_up",
    "round_queries", "scan_pairs", "scan_queues",
]  # fmt: skip
