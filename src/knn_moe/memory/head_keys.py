"""The keys of a language-model head that looks up hidden states: one for each case of a memory.

A memory has them only where its routing has such a head; `calibrate` computes them from the
memory's own tokens. Knows tensors and their file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from knn_moe.config import IndexConfig, RoutingConfig
from knn_moe.errors import MemoryFormatError
from knn_moe.memory.gamma import estimate_gamma
from knn_moe.reference.provenance import Provenance


@dataclass(frozen=True)
class HeadKeys:
    """The last hidden state of each case, or what an index keeps of them.

    `tensors` are those of the index. The "exact" index is the keys of all cases, "keys" [M, d];
    others hold the cases that a token followed.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    gamma: float  # from these keys' own distances
    index: IndexConfig = field(default_factory=IndexConfig)

    @classmethod
    def of(cls, keys: Tensor, provenance: Provenance) -> HeadKeys:
        """Take keys and find out their γ. Shapes: keys [M, d], on any device."""
        gamma = estimate_gamma(keys, provenance.example, provenance.prefix_hash())
        return cls({"keys": keys.cpu()}, gamma)

    @property
    def keys(self) -> Tensor:
        """The keys of all cases. Shape [M, d].

        Raises:
            MemoryFormatError: They became an index.
        """
        if self.index.kind != "exact":
            raise MemoryFormatError(
                f"The head's keys became a {self.index.kind!r} index. Use the memory that it was "
                f"compressed from."
            )
        return self.tensors["keys"]

    @property
    def width(self) -> int:
        """The width of the keys, also where they became an index."""
        named = self.tensors.get("keys", self.tensors.get("centre", torch.empty(0)))
        return named.shape[-1] if named.ndim else 0

    @property
    def nbytes(self) -> int:
        """The bytes of the keys or of their index."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def entry(self) -> dict[str, Any]:
        """Return what memory_config.json says of them, beside their file."""
        return {"gamma": self.gamma, "index": self.index.to_dict()}

    @classmethod
    def read(cls, entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> HeadKeys:
        """Return the keys that `entry()` and their tensors describe."""
        return cls(tensors, entry["gamma"], IndexConfig(**entry["index"]))


def uses_head_keys(routing: RoutingConfig) -> bool:
    """Whether a memory that is used like this needs head keys."""
    return routing.head is not None and routing.head.keys == "hidden"


def join_head_keys(
    parts: Sequence[HeadKeys | None], provenance: Provenance, rows: Tensor | None, *, same: bool
) -> HeadKeys | None:
    """Put the head keys of several memories one after the other, or take `rows` of a single one.

    Args:
        parts: The head keys of each memory. Where one has none, the result is None.
        provenance: Of the cases that are left.
        rows: The rows that are left [n] int64; None: all.
        same: Keep the γ of the first part instead of estimating it.
    """
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    keys = known[0].keys if len(known) == 1 else torch.cat([part.keys for part in known])
    keys = keys if rows is None else keys[rows]
    return HeadKeys({"keys": keys}, known[0].gamma) if same else HeadKeys.of(keys, provenance)
