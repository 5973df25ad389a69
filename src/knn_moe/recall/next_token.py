"""What followed the nearest cases: the search of a language-model head.

Knows keys and tokens; where queries come from and how tokens are mixed in is inference/'s.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knn_moe.config import IndexConfig
from knn_moe.errors import MemoryFormatError
from knn_moe.index import KeyIndex, build_index, load_index
from knn_moe.memory.memory import RoutingMemory
from knn_moe.memory.validate import check_head_contents
from knn_moe.recall.layer import rows_of


class TokenIndex(nn.Module):
    """Keys that can be searched, and the token that followed each.

    A module only so that its tensors are buffers, which compilers treat as static. Shapes:
    following [M] int64.
    """

    following: Tensor

    def __init__(self, index: KeyIndex, following: Tensor) -> None:
        super().__init__()
        self.index = index
        self.register_buffer("following", following, persistent=False)

    def __len__(self) -> int:
        return len(self.following)

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the squared distances of the k nearest keys and the tokens that followed them.

        Shapes: queries [T, d]. Result [T, k] fp32, nearest first, inf where an index found fewer
        than k; and [T, k] int64.
        """
        distance, places = self.index.search(queries.to(self.following.device), k)
        return distance, self.following[rows_of(self.index, places)]


def open_head_keys(
    memory: RoutingMemory, config: IndexConfig | None, device: torch.device
) -> TokenIndex:
    """Make the memory's head keys searchable on `device`, with the index of `config`.

    Cases that no token followed are left out. Keys that became an index stay that index.

    Raises:
        MemoryFormatError: The memory has no head keys, or they are not finite.
    """
    stored = memory.head_keys
    if stored is None:
        raise MemoryFormatError(
            f"{memory!r} has no hidden states, and its head looks them up. Run `knn-moe calibrate "
            f'--head`, or use HeadConfig(keys="router").'
        )
    check_head_contents(stored, memory.provenance, "The head of this memory")
    following = memory.provenance.following
    told = following >= 0
    if stored.index.kind == "exact":
        keys = stored.keys if bool(told.all()) else stored.keys[told]
        index = build_index(keys, config or stored.index, device)
    else:
        index = load_index(stored.tensors, stored.index, device)
    return TokenIndex(index, following[told].to(device))
