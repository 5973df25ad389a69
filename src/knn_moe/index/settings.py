"""Which index, and its knobs. Knows names and ranges; nothing of tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from knn_moe.errors import ConfigError

INDEXES: Final = ("exact", "faiss-flat", "ivfpq", "fast")
DIMS_STEP: Final = 64  # of `fast`: what its kernels read at a time
_PROBES: Final = {"ivfpq": 32, "fast": 16}  # the paper's; as many as recall asks for


_BY_KIND: Any = None


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """How a layer's nearest keys are found. What a kind has no use for, it passes over."""

    kind: str = "exact"  # one of INDEXES
    probes: int = _BY_KIND  # ivfpq, fast: lists of the partition that are searched
    dims: int | None = None  # ivfpq, fast: width after projection. None: the kind's own rule
    bits: int = 4  # fast: of each number of a key, 4 or 8
    value_bits: int = 8  # fast: of each number of a value, 4 or 8
    rerank: bool = False  # ivfpq, fast: keep the keys; true distances order the candidates

    def __post_init__(self) -> None:
        if self.kind not in INDEXES:
            raise ConfigError(f"Unknown index {self.kind!r}. Available: {', '.join(INDEXES)}.")
        if self.probes is _BY_KIND:
            object.__setattr__(self, "probes", _PROBES.get(self.kind, 1))
        if not isinstance(self.probes, int) or self.probes < 1:
            raise ConfigError(f"probes must be a whole number of at least 1, got {self.probes}.")
        if self.dims is not None and (not isinstance(self.dims, int) or self.dims < 1):
            raise ConfigError(f"dims must be a whole number of at least 1, got {self.dims}.")
        if self.kind == "fast" and self.dims is not None and self.dims % DIMS_STEP:
            raise ConfigError(f"dims of fast must be a multiple of {DIMS_STEP}, got {self.dims}.")
        for name in ("bits", "value_bits"):
            if getattr(self, name) not in (4, 8):
                raise ConfigError(f"{name} must be 4 or 8, got {getattr(self, name)}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
