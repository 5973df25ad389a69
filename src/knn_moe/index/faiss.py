"""FAISS's indexes: flat in fp16, and IVFPQ. Knows keys and distances; nothing of routing.

The only file that imports faiss, and only when an index needs it. FAISS sees keys centred, and
scaled by a power of two to coordinates below 1, since fp16 ends at 65504 and bf16 does not.
Distances are scaled back.

IVFPQ sees a projection of the keys (PCA) and chooses by it. The paper leaves open which distance λ
then takes. Here it is the full one, ‖x - k‖² = ‖Px - Pk‖² + ‖x'‖² + ‖k'‖² - 2x'·k', where x' and k'
are what the projection drops. Only the norm of k' is stored; but near keys are near there too, so
x'·k' ≈ ρ ‖x'‖ ‖k'‖. ρ, and what quantisation adds, are fitted to the keys' own neighbours, as in
`fast` (index/fast/grid.py). That is right on average over the 16 nearest; the very nearest still
seem too far. With `rerank` the keys are stored, and distances are exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from knn_moe.config import IndexConfig
from knn_moe.errors import MemoryFormatError, MissingDependencyError
from knn_moe.index.exact import distances_to_rows, row_blocks, spread_evenly
from knn_moe.index.fast.grid import Correction, fit_correction, principal_axes

_SAMPLE: Final = 1 << 16  # rows that IVFPQ is trained on
_ROWS_PER_LIST: Final = 39  # with fewer, FAISS warns that a list is badly trained
_CODES: Final = 256  # that eight bits can tell apart
_ROWS_PER_CODE: Final = 64  # FAISS's 256 rows and 25 rounds find no more, in 12 times the time
_ROUNDS: Final = 10
_FIT: Final = 1024  # keys that the correction is fitted to
_FIT_NEAREST: Final = 17  # and their neighbours, the key itself among them
_MOST_BYTES: Final = 96  # of a key's code: GPUs take no more
_GPU_BYTES: Final = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)
_GPU_CANDIDATES: Final = 2048  # at most, from a GPU index
_GPU_SCRATCH: Final = 1 << 26  # bytes; FAISS would take gigabytes
# A thread must save more than waiting for a busy core costs, about 8 ms. A query of 100k keys × 512
# takes 12 ms in the flat index, 0.5 ms in IVFPQ.
_QUERIES_PER_THREAD: Final = {"faiss-flat": 1, "ivfpq": 8}


class FaissIndex:
    """Keys in a FAISS index: on the GPU where FAISS was built for it, else on the CPU."""

    def __init__(
        self, index: Any, parts: Mapping[str, Tensor], config: IndexConfig, device: torch.device
    ) -> None:
        """`parts`: what belongs to the index beside FAISS's own, as `tensors` names it."""
        _keep_out_of_graphs()
        self._config = config
        self._index = index  # stays on the CPU, to be saved: from a GPU it would come back in fp32
        self._parts = {name: part.to(device) for name, part in parts.items()}
        if config.kind == "ivfpq":
            index.nprobe = config.probes
        self._searched = _on_gpu(index, device)

    @classmethod
    def build(cls, keys: Tensor, config: IndexConfig, device: torch.device) -> FaissIndex:
        """Build an index of `keys`, for queries on `device`. Shapes: keys [M, d]."""
        faiss = _faiss(config.kind)
        parts = _frame(keys, device)
        if config.kind == "ivfpq":
            index = _train(keys, parts, config)
        else:
            fp16 = faiss.ScalarQuantizer.QT_fp16
            index = faiss.IndexScalarQuantizer(keys.shape[1], fp16, faiss.METRIC_L2)
        residuals = []
        for part in _scale_blocks(keys, parts):
            stored, residual = _project(part, parts)
            index.add(stored.cpu().numpy())
            residuals.append(residual)
        if config.kind == "ivfpq":
            index.pq.clear_transposed_centroids()
            parts["residuals"] = torch.cat(residuals)
            if config.rerank:
                parts["keys"] = keys
        built = cls(index, parts, config, device)
        if config.kind == "ivfpq":
            built._parts["correction"] = built._fit(keys)
        return built

    @classmethod
    def load(
        cls, tensors: Mapping[str, Tensor], config: IndexConfig, device: torch.device
    ) -> FaissIndex:
        """Restore the index whose `tensors()` these are, for queries on `device`.

        Tensors of a memory were checked before (index/check.py): FAISS trusts what it reads.

        Raises:
            MemoryFormatError: A tensor is missing, or FAISS cannot read its own part.
        """
        faiss = _faiss(config.kind)
        names = ["centre", "scale"]
        if config.kind == "ivfpq":
            names += ["projection", "residuals", "correction"] + ["keys"] * config.rerank
        if missing := sorted({"faiss", *names} - tensors.keys()):
            raise MemoryFormatError(
                f"The saved index {config.kind!r} lacks {', '.join(missing)}. Build it again."
            )
        # The tables take many times the memory of the codes, and save no measurable time.
        without_tables = faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
        data = tensors["faiss"].cpu().numpy()
        try:
            with _limits(faiss, len(data)):
                index = faiss.deserialize_index(data, without_tables)
        except RuntimeError as error:
            raise MemoryFormatError(
                f"The saved index {config.kind!r} is damaged ({error}). Build it again."
            ) from error
        return cls(index, {name: tensors[name] for name in names}, config, device)

    def tensors(self) -> dict[str, Tensor]:
        """See KeyIndex. "faiss" holds FAISS's own format in bytes, "keys" the keys to rerank."""
        serialized = _faiss(self._config.kind).serialize_index(self._index)
        return {"faiss": torch.from_numpy(serialized), **self._parts}

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See KeyIndex. Shapes: queries [T, d] → squared distances, rows [T, k].

        Distances of IVFPQ are approximate unless it reranks: see the top of this file. A query
        that is not finite finds nothing.
        """
        keys, scale = self._parts.get("keys"), self._parts["scale"]
        count = k if keys is None else max(k, min(4 * k + 16, _GPU_CANDIDATES))
        distance, rows, dropped = self._find(queries, count)
        missing = distance.isinf()
        if keys is not None:
            distance = distances_to_rows(queries, keys, rows, scale)
        elif (correction := self._parts.get("correction")) is not None:
            residual = self._parts["residuals"][rows]
            distance = Correction(*correction).apply(distance, dropped, residual.sqrt())
        # NaN is inf - inf, of a query so far off that ‖x'‖² is past fp32.
        distance = distance.masked_fill(missing | distance.isnan(), math.inf)
        distance, order = torch.topk(distance, k, dim=-1, largest=False)
        return distance / scale / scale, rows.gather(1, order)  # scale² may overflow

    def _find(self, queries: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nearest by what FAISS sees, in scaled units, and ‖x'‖² of the queries.

        Shapes: queries [T, d] → distances, rows [T, count]; [T].
        """
        wanted, dropped = _project(_scale(queries, self._parts), self._parts)
        with _threads(len(queries), self._config.kind):
            found = self._searched.search(wanted.cpu().numpy(), count)
        distance, rows = (torch.from_numpy(part).to(queries.device) for part in found)
        return distance.clamp(min=0).masked_fill(rows < 0, math.inf), rows.clamp(min=0), dropped

    def _fit(self, keys: Tensor) -> Tensor:
        """Fit the correction to a sample of the keys and their neighbours. Result [4]."""
        scale, residuals = self._parts["scale"], self._parts["residuals"]
        sample = spread_evenly(_FIT, len(keys), keys.device)
        queries = keys[sample]
        found, rows, dropped = self._find(queries.to(scale.device), min(_FIT_NEAREST, len(keys)))
        exact = distances_to_rows(queries, keys, rows.to(keys.device), scale.to(keys.device))
        key, query = residuals[rows].sqrt(), dropped[:, None].expand_as(found)
        other = found.isfinite() & (rows != sample.to(rows.device)[:, None])
        pairs = (found, query, key, exact.to(scale.device))
        fitted = fit_correction(*(part[other] for part in pairs))
        # FAISS chooses by the projected distance alone.
        return torch.stack(fitted._replace(weight=torch.zeros_like(fitted.weight)))


@contextmanager
def _limits(faiss: Any, size: int) -> Iterator[None]:
    """Let FAISS read no vector of more than `size` bytes, where its version has such a limit."""
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):
        yield
        return
    before = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(size)
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before)


@functools.cache
def _keep_out_of_graphs() -> None:
    """Keep FAISS out of torch.compile. That imports the compiler, two seconds, hence so late."""
    FaissIndex.search = torch.compiler.disable(FaissIndex.search)  # type: ignore[method-assign]


def _faiss(kind: str) -> Any:
    try:
        import faiss
    except ImportError:
        raise MissingDependencyError(
            f"The index {kind!r} needs FAISS, which is not installed: pip install faiss-cpu"
        ) from None
    return faiss


def _frame(keys: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the keys' mean, and the power of two that scales all coordinates around it below 1.

    Shapes: keys [M, d]. Result: centre [d], scale [], fp32.
    """
    blocks = list(row_blocks(len(keys), device))
    centre = torch.zeros(keys.shape[1], device=device)
    for start, stop in blocks:  # divided first: a sum of large keys overflows
        centre += (keys[start:stop].to(device).float() / len(keys)).sum(dim=0)
    extents = [(keys[a:b].to(device).float() - centre).abs().amax() for a, b in blocks]
    exponent = torch.frexp(torch.stack(extents).amax()).exponent
    # For keys that are all equal the exponent is 0. Scales beyond 2¹⁰⁰ would soon be infinite.
    return {"centre": centre, "scale": torch.exp2(-exponent.clamp(min=-100).float())}


def _scale(x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Centre and scale. Shapes: x [n, d] → [n, d] fp32, on the device of the parts."""
    centre = parts["centre"]
    return (x.to(centre.device).float() - centre) * parts["scale"]


def _scale_blocks(keys: Tensor, parts: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield scaled keys by blocks, so that no fp32 copy is held whole."""
    for start, stop in row_blocks(len(keys), parts["centre"].device):
        yield _scale(keys[start:stop], parts)


def _project(x: Tensor, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what FAISS sees of scaled vectors, and the squared norm of what it does not.

    Shapes: x [n, d] → [n, r], [n].
    """
    if "projection" not in parts:
        return x, x.new_zeros(len(x))
    with torch.autocast(x.device.type, enabled=False):
        projected = x @ parts["projection"]
    residual = x.square().sum(dim=-1) - projected.square().sum(dim=-1)
    return projected, residual.clamp(min=0)


def _train(keys: Tensor, parts: dict[str, Tensor], config: IndexConfig) -> Any:
    """Return an empty IVFPQ trained on a sample of the keys; add its projection to `parts`."""
    faiss = _faiss(config.kind)
    sample = keys[spread_evenly(_SAMPLE, len(keys), keys.device)]
    dims, codes, lists = ivfpq_layout(len(keys), keys.shape[1], config)
    parts["projection"] = _principal_axes(sample, parts, dims, codes)
    points = torch.cat([_project(part, parts)[0] for part in _scale_blocks(sample, parts)])
    if len(sample) < _CODES:  # FAISS wants as many; repeated, each point gets its own code
        points = points.repeat(math.ceil(_CODES / len(sample)), 1)[:_CODES]
    # index_factory would add polysemous training, ten times as long and of no use here.
    index = faiss.IndexIVFPQ(faiss.IndexFlatL2(dims), dims, lists, codes, 8)
    index.use_precomputed_table = -1  # as in `load`
    index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1  # else it warns
    index.pq.cp.max_points_per_centroid, index.pq.cp.niter = _ROWS_PER_CODE, _ROUNDS
    index.train(points.cpu().numpy())
    if index.pq.dsub == 1:
        index.pq.sync_transposed_centroids()  # adding is 15 times faster, for single numbers only
    return index


def ivfpq_layout(count: int, width: int, config: IndexConfig) -> tuple[int, int, int]:
    """Return how IVFPQ stores `count` keys of `width`: dimensions, bytes of a code, lists."""
    dims = min(config.dims or max(width // 8, 1), width)
    codes = max(m for m in range(1, min(dims, _MOST_BYTES) + 1) if dims % m == 0)
    lists = max(1, min(int(4 * math.sqrt(count)), min(count, _SAMPLE) // _ROWS_PER_LIST))
    return dims, codes, lists


def _principal_axes(sample: Tensor, parts: Mapping[str, Tensor], dims: int, codes: int) -> Tensor:
    """Return the first `dims` principal axes, dealt out in turn to the runs that share a code.

    In their own order the first codes would carry most of the variance, and recall would drop.
    Shapes: sample [n, d] → [d, dims].
    """
    width = sample.shape[1]
    covariance = torch.zeros(width, width, device=parts["centre"].device)
    for part in _scale_blocks(sample, parts):
        covariance += part.T @ part
    axes = principal_axes(covariance)[:, -dims:]
    return axes.reshape(width, -1, codes).transpose(1, 2).reshape(width, dims)


@contextmanager
def _threads(queries: int, kind: str) -> Iterator[None]:
    """Use as many OpenMP threads as pay off for these queries; restore their number afterwards."""
    faiss = _faiss(kind)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(max(1, min(before, queries // _QUERIES_PER_THREAD[kind])))
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _on_gpu(index: Any, device: torch.device) -> Any:
    """Return the index on its GPU, or itself if FAISS has no GPU support or none for its code."""
    import faiss

    if device.type != "cuda" or not hasattr(faiss, "StandardGpuResources"):
        return index
    if not faiss.get_num_gpus() or (hasattr(index, "pq") and index.pq.M not in _GPU_BYTES):
        return index
    number = torch.cuda.current_device() if device.index is None else device.index
    options = faiss.GpuClonerOptions()
    options.useFloat16 = True  # the tables of 56 bytes and more do not fit in fp32
    options.use_cuvs = False  # has no flat fp16
    return faiss.index_cpu_to_gpu(_gpu_resources(number), number, index, options)


@functools.cache
def _gpu_resources(number: int) -> Any:
    """Return the resources that all layers share: each would claim memory of its own."""
    import faiss

    resources = faiss.StandardGpuResources()
    resources.setTempMemory(_GPU_SCRATCH)
    return resources
