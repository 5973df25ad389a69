"""One layer of a distilled memory (equations/prototypes.py) as Triton kernels.

Two launches serve every number of tokens: `compare_prototypes` (compare.py) splits the prototypes
over programs, and `mix_prototypes` (mix.py) puts together what they found, mixes and counts. The
tokens of one call may use different memories. Tests compare them with DistilledRecall in plain
torch (tests/recall/test_distilled_kernels.py).

Shapes: S memories, T tokens, P prototypes of the largest of them, D input width, N experts. Names
in capitals are known when a kernel is compiled:

TOKENS, ROWS, COLUMNS     a program multiplies blocks of TOKENS inputs and ROWS factors, by COLUMNS
SPAN                      prototypes that one program of `compare_prototypes` walks over
SPLITS                    such programs to a memory: ⌈P / SPAN⌉
STRIDE                    numbers that `compare_prototypes` writes for a token, see there
NP, SP, MP                the powers of two from N (at least 16), SPLITS and S up
LINES                     the power of two from the cache lines of a factor up
CHUNK                     splits that are read together
PER                       tokens that one program of `mix_prototypes` mixes
SLOTS                     1: `slots` says which memory each token uses; 0: there is only one
MASKED                    1: `real` says which tokens are no padding
TOP                       experts that the router chooses, to count changed choices; 0: do not count
PREFETCH                  1: factors are fetched while the previous kernel still runs
ASM                       1: kernels may contain PTX
PDL                       1: they may be launched before the previous kernel has ended
"""

from knn_moe.recall.kernels.compare import compare_prototypes
from knn_moe.recall.kernels.mix import mix_prototypes

__all__ = ["compare_prototypes", "mix_prototypes"]
