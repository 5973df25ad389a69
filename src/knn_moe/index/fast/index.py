"""`fast`: keys as a few small whole numbers, in lists of which only the nearest are searched.

A key is a point on a grid (grid.py), with 4 or 8 bits for each coordinate, in the order of a coarse
partition (partition.py). A query probes the lists with the nearest centres, estimates the distance
to every key there in whole numbers (scan.py), and corrects the nearest for what the projection
dropped. On a GPU, kernels/ does all of that and the mixing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from knn_moe.config import DIMS_STEP, IndexConfig
from knn_moe.errors import ConfigError
from knn_moe.index.exact import spread_evenly, squared_distance
from knn_moe.index.fast.grid import (
    FARTHEST,
    Correction,
    Grid,
    fit_correction,
    from_codes,
    round_to_grid,
    to_codes,
)
from knn_moe.index.fast.packing import pack
from knn_moe.index.fast.partition import list_means, partition
from knn_moe.index.fast.scan import NOT_FOUND, PLACE_BITS, Lists, decode_codes, scan

_MOST_DIMS: Final = 1024  # of keys that have fewer: the others are zero, and take time to make
_FEWEST_DIMS: Final = 256  # small models have few dimensions to save, and need them
_FIT: Final = 1024  # keys that the correction is fitted to
_FIT_NEAREST: Final = 17  # and their neighbours, the key itself among them
_BLOCK: Final = 1 << 15  # keys encoded at a time

# (queries [T, d], k) → squared distances, places [T, k]
KernelSearch: TypeAlias = Callable[[Tensor, int], tuple[Tensor, Tensor]]
MOST_FOUND: Final = 128  # neighbours that the kernels can find; plain torch finds more


class FastIndex(nn.Module):
    """Codes in list order, the lists' centres, and the grid. `search` returns places in list order.

    A module, so that torch.compile treats its tensors as static.
    Shapes: projection [r, d], offset [r], centre [d], step []: see Grid. codes, norms, centres,
    begin: see Lists. dropped [M] fp16: ‖k⊥‖. rows [M] int32: the row of the memory at each
    place. correction [4]: see Correction. keys [M, d], in list order: only with `rerank`.
    """

    projection: Tensor
    offset: Tensor
    centre: Tensor
    step: Tensor
    codes: Tensor
    norms: Tensor
    dropped: Tensor
    centres: Tensor
    begin: Tensor
    rows: Tensor
    correction: Tensor
    keys: Tensor | None

    def __init__(self, tensors: Mapping[str, Tensor], config: IndexConfig) -> None:
        super().__init__()
        self.register_buffer("keys", None, persistent=False)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.probes = min(config.probes, len(self.centres))
        self.kernel_search: KernelSearch | None = None  # kernels that replace `estimate`
        # A CPU multiplies bytes, not halves of them: four-bit codes are unpacked once.
        self.scanned = self.codes
        if self.codes.is_cpu and self.codes.dtype == torch.uint8:
            self.scanned = decode_codes(self.codes).to(torch.int8)
        self.coarse = self.centres.float() if self.centres.is_cpu else self.centres
        self.coarse_norms = self.centres.float().square().sum(dim=-1)

    @staticmethod
    def build(keys: Tensor, config: IndexConfig) -> FastIndex:
        """Build an index of keys on their own device. Shapes: keys [M, d].

        Raises:
            ConfigError: The config asks for far more dimensions than the keys have.
        """
        width = keys.shape[1]
        dims = config.dims or default_dims(width)
        if dims > max(width, _MOST_DIMS):
            raise ConfigError(f"dims of fast is {dims}, and keys have only {width}. Use fewer.")
        grid = Grid.fit(keys, dims, config.bits)
        projected = torch.cat([grid.project(part) for part in keys.split(_BLOCK)])
        order, begin = partition(projected)
        tensors = {
            **grid._asdict(),
            **_encode(grid, keys, projected, order, config.bits),
            "centres": round_to_grid(list_means(projected[order], begin)).to(torch.int8),
            "begin": begin.int(),
            "rows": order.int(),
            "correction": torch.zeros(4, device=keys.device),
        }
        if config.rerank:
            tensors["keys"] = keys[order]
        index = FastIndex(tensors, config)
        squares, dropped = index.norms, index.dropped.float().square()
        # Twice: the neighbours found depend on the weight of ‖k⊥‖², which is fitted to them.
        for _ in range(2):
            fitted = index._fit(keys)
            index.correction = torch.stack(fitted)
            weighed = (squares + fitted.weight * dropped).round()
            index.norms = weighed.clamp(max=FARTHEST).int()
        return index

    def tensors(self) -> dict[str, Tensor]:
        """See KeyIndex."""
        return dict(self.named_buffers())

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See KeyIndex. Shapes: queries [T, d] → squared distances, places [T, k]."""
        if self.keys is None:
            return self.estimate(queries, k)
        estimated, places = self.estimate(queries, min(candidates(k), len(self.codes)))
        exact = squared_distance(queries[:, None], self.keys[places])
        exact = torch.where(estimated.isinf(), estimated, exact)
        distance, order = torch.topk(exact, k, dim=-1, largest=False)
        return distance, places.gather(1, order)

    def estimate(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k nearest by estimate, nearest first. Shapes: as `search`."""
        if self.kernel_search is not None and k <= MOST_FOUND:
            return self.kernel_search(queries, k)
        found, dropped = self._scan(queries, k)
        estimate, places = _unpack_found(found)
        correction = Correction(*self.correction)
        grid = correction.apply(estimate, dropped, self.dropped[places].float())
        # NaN is inf - inf, of a query so far off that ‖x⊥‖² is past fp32.
        missing = (found == NOT_FOUND) | grid.isnan()
        return (grid * self.step.square()).masked_fill(missing, float("inf")), places

    def _scan(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return what `scan` finds, and ‖x⊥‖². Shapes: queries [T, d] → [T, k] int64, [T]."""
        grid = Grid(self.projection, self.offset, self.centre, self.step)
        lists = Lists(self.scanned, self.norms, self.coarse, self.coarse_norms, self.begin)
        projected = grid.project(queries)
        return scan(lists, round_to_grid(projected), self.probes, k), grid.dropped(
            queries, projected
        )

    def _fit(self, keys: Tensor) -> Correction:
        """Fit the correction to a sample of the keys and the neighbours found for them."""
        sample = spread_evenly(_FIT, len(keys), keys.device)
        found, dropped = self._scan(keys[sample], min(_FIT_NEAREST, len(keys)))
        estimate, places = _unpack_found(found)
        rows = self.rows[places].long()
        other = (found != NOT_FOUND) & (rows != sample[:, None])
        exact = squared_distance(keys[sample, None], keys[rows]) / self.step.square()
        key = self.dropped[places].float()
        projected = estimate - self.correction[3] * key.square()
        query = dropped[:, None].expand_as(key)
        return fit_correction(projected[other], query[other], key[other], exact[other])


def candidates(k: int) -> int:
    """Return how many candidates exact distances choose k neighbours from."""
    return 4 * k + 12


def default_dims(width: int) -> int:
    """Return an eighth of the inputs' width, but enough for a small model."""
    dims = max(width // 8, min(width, _FEWEST_DIMS))
    return -(-dims // DIMS_STEP) * DIMS_STEP


def _encode(
    grid: Grid, keys: Tensor, projected: Tensor, order: Tensor, bits: int
) -> dict[str, Tensor]:
    """Return codes, norms and dropped, in the order of the lists."""
    parts: dict[str, list[Tensor]] = {"codes": [], "norms": [], "dropped": []}
    for rows in order.split(_BLOCK):
        dropped = grid.dropped(keys[rows], projected[rows])
        codes = to_codes(projected[rows], bits)
        norms = from_codes(codes, bits).square().sum(dim=-1)
        parts["codes"].append(pack(codes, bits))
        parts["norms"].append(norms.int())
        largest = torch.finfo(torch.float16).max
        parts["dropped"].append(dropped.sqrt().clamp(max=largest).half())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def _unpack_found(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return estimates in fp32, and places, 0 where nothing was found. Shapes: [T, k] twice."""
    places = torch.where(found == NOT_FOUND, 0, found & (2**PLACE_BITS - 1))
    return (found >> PLACE_BITS).float(), places
