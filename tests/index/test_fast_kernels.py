"""The kernels of `fast` against plain torch: FastIndex.estimate, PackedValues.at and mixing.py.

Without a GPU, Triton's interpreter runs them (conftest.py turns it on). Most indexes here lie on a
grid of whole numbers, so that nothing is rounded and the places found must be the same. tests/gpu
has more of this for real GPUs.
"""

from __future__ import annotations

import pytest
import torch

from helpers.kernel_layers import (
    DEVICE,
    LISTS,
    WIDTHS,
    Layer,
    LayerCase,
    check_recall,
    check_search,
    every_case,
    no_counts,
    randn,
    use_path,
)
from helpers.points import DTYPES, clustered, share_found, split
from knn_moe.index import FastIndex, IndexConfig
from knn_moe.index.fast import fused, launch
from knn_moe.index.fast.fused import FusedRecall
from knn_moe.index.fast.grid import Grid, round_to_grid
from knn_moe.index.fast.launch import DECODE_QUERIES, DecodeLauncher, search
from knn_moe.index.fast.scan import BINS, Lists, nearest_lists
from knn_moe.index.fast.tensors import KernelConfig, prepare_tensors
from knn_moe.index.fast.values import PackedValues

pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
SMALL_BATCH = DECODE_QUERIES + 1
decode_and_small_batch = pytest.mark.parametrize("queries", [2, SMALL_BATCH])


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several lists to a program: the interpreter is slow at what every program does."""
    use_path("decode", monkeypatch)


@pytest.fixture(params=["small_batch", "prefill"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_path(request.param, monkeypatch)
    name: str = request.param
    return name


@pytest.mark.slow
@every_case
def test_recall_and_search(path: str, case: LayerCase, monkeypatch: pytest.MonkeyPatch) -> None:
    use_path(path, monkeypatch)
    layer = Layer(case)
    check_recall(layer, layer.recall)
    check_search(layer)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decoding_in_half_precision(dtype: torch.dtype) -> None:
    """The other kernels need a matrix product that a CPU does not have: see tests/gpu."""
    layer = Layer(LayerCase(queries=1, k=2, probes=1), dtype)
    check_recall(layer, layer.recall)


@pytest.mark.slow
def test_a_program_for_each_list_and_a_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_PROGRAMS", 100)
    layer = Layer(LayerCase(queries=1, k=2))
    launcher = DecodeLauncher(layer.tensors(), layer.config)
    assert launcher.programs >= len(LISTS)
    mixed, weight = check_recall(layer, launcher)
    second = launcher(layer.inputs, layer.logits, no_counts(), None)
    assert torch.equal(second[0], mixed)
    assert torch.equal(second[1], weight)


@pytest.mark.slow
def test_more_queries_than_are_served_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_AT_ONCE", 3)
    layer = Layer(LayerCase(queries=SMALL_BATCH, k=1, probes=1, padded=True))
    check_recall(layer, layer.recall)
    check_search(layer)


@pytest.mark.slow
def test_with_nothing_to_correct_distances_are_the_same_to_the_last_bit(path: str) -> None:
    layer = Layer(LayerCase(queries=SMALL_BATCH, k=2, probes=1))
    layer.index.correction.zero_()
    distance, _ = search(layer.inputs, layer.tensors(), layer.config)
    assert torch.equal(distance, layer.index.estimate(layer.inputs, 2)[0])


def test_neighbours_that_a_list_does_not_have(path: str) -> None:
    layer = Layer(LayerCase(queries=2, k=5, probes=1))
    layer.inputs = layer.on_grid(layer.centres[[3, 0]])
    expected, _ = layer.index.estimate(layer.inputs, 5)
    assert expected.isinf().sum(dim=-1).tolist() == [4, 2]
    check_search(layer)


def test_neighbours_that_a_list_does_not_have_weigh_nothing() -> None:
    layer = Layer(LayerCase(queries=1, k=5, probes=1))
    layer.inputs = layer.on_grid(layer.centres[[0]])
    _, weight = check_recall(layer, layer.recall)
    assert 0 < weight.item() <= 3 / 5


def test_as_many_neighbours_as_there_are_bins() -> None:
    check_search(Layer(LayerCase(queries=1, k=BINS, probes=1)))


@pytest.mark.slow
def test_of_equal_keys_the_first_places_are_found(path: str) -> None:
    layer = Layer(LayerCase(queries=2, k=4, probes=100))
    layer.index.codes[:] = layer.index.codes[0]
    layer.index.norms[:] = layer.index.norms[0]
    _, places = search(layer.inputs, layer.tensors(), layer.config)
    assert places.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "far"), [(1, 1e15), (SMALL_BATCH, 1e2)])
def test_a_query_far_from_everything_keeps_its_logits(far: float, queries: int) -> None:
    layer = Layer(LayerCase(queries=queries, k=2, probes=1))
    layer.inputs = far * randn(queries, 33)
    mixed, weight = layer.recall(layer.inputs, layer.logits, no_counts(), None)
    assert weight.eq(0).all()
    assert torch.equal(mixed, layer.logits)


def test_where_no_neighbour_is_similar_the_logits_are_kept() -> None:
    layer = Layer(LayerCase(queries=1, k=2, probes=1, cosine=1))
    layer.inputs = -layer.inputs * 3
    mixed, weight = layer.recall(layer.inputs, layer.logits, no_counts(), None)
    assert weight.eq(0).all()
    assert torch.equal(mixed, layer.logits)


@pytest.mark.slow
@decode_and_small_batch
def test_experts_with_equal_logits_are_chosen_from_the_first_on(queries: int) -> None:
    """Nothing changes while ties stay ties; a logit that leaves a tie changes the choice."""
    layer = Layer(LayerCase(queries=queries, k=1, probes=1, experts=5))
    layer.logits = torch.tensor([[0.0, 1, 0, 0, 0]], device=DEVICE).expand(queries, -1)
    for proposed, changed in ([9.0, 1, 0, 0, 0], 0), ([0.0, 1, 0, 0, 9], queries):
        values = torch.tensor([proposed], device=DEVICE).expand(len(layer.index.codes), -1)
        layer.values, counts = PackedValues.of(values, 8), no_counts()
        _, weight = layer.recall(layer.inputs, layer.logits, counts, None)
        assert weight.gt(0).all()
        assert counts[2] == changed


def test_no_queries() -> None:
    layer, counts = Layer(LayerCase(queries=0, k=2)), no_counts()
    mixed, weight = layer.fused()(layer.inputs, layer.logits, counts, None)
    assert (mixed.shape, weight.shape) == ((0, 8), (0,))
    assert counts.tolist() == [1, 0, 0, 0]
    distance, places = layer.fused().search(layer.inputs, 2)
    assert distance.shape == places.shape == (0, 2)


@pytest.mark.slow
@decode_and_small_batch
def test_inputs_that_are_not_contiguous_and_logits_that_are_not_aligned(queries: int) -> None:
    layer = Layer(LayerCase(queries=queries, k=1, probes=1))
    layer.inputs = layer.inputs.T.contiguous().T
    logits = torch.cat([layer.logits.new_zeros(1), layer.logits.flatten()])
    layer.logits = logits[1:].view(queries, -1)
    check_recall(layer, layer.fused())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, about NaN
@pytest.mark.parametrize(
    ("path", "queries"), [("decode", 2), ("small_batch", SMALL_BATCH), ("prefill", SMALL_BATCH)]
)
def test_a_query_that_is_not_a_number_does_not_affect_others(
    path: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this call and in later ones: a list is probed once, whatever its distance."""
    use_path(path, monkeypatch)
    layer = Layer(LayerCase(queries=queries, k=1, probes=2))
    fused_layer, (expected, _) = layer.fused(), layer.expected()
    broken = layer.inputs.clone()
    broken[1] = float("nan")
    others = torch.arange(queries, device=DEVICE) != 1
    found, _ = fused_layer(broken, layer.logits, no_counts(), None)
    torch.testing.assert_close(found[others], expected[others], rtol=1e-4, atol=1e-4)
    check_recall(layer, fused_layer)


# The tensors that kernels read, and the module that holds them


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_are_finite_except_for_lists_that_are_never_near(dtype: torch.dtype) -> None:
    keys = (0.1 * clustered(1000, 200)).to(DEVICE, dtype)
    index = FastIndex.build(keys, IndexConfig(kind="fast"))
    tensors = prepare_tensors(index, PackedValues.of(randn(1000, 8), 8), WIDTHS)
    assert tensors.stacked.isfinite().all()
    real = len(index.projection) + len(index.centres)
    assert tensors.shift[:real].isfinite().all()
    assert tensors.shift[real:].isneginf().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_coarse_distances_order_the_lists_as_grid_points_do(dtype: torch.dtype) -> None:
    """Except for near ties, and whatever the keys have in common."""
    points = clustered(3000, 100) + 100 * torch.randn(100)
    keys, queries = split(points.to(DEVICE, dtype), queries=200)
    index = FastIndex.build(keys, IndexConfig(kind="fast", probes=4))
    tensors = prepare_tensors(index, PackedValues.of(randn(len(keys), 8), 8), WIDTHS)
    grid = Grid(index.projection, index.offset, index.centre, index.step)
    lists = Lists(index.codes, index.norms, index.centres, index.coarse_norms, index.begin)
    expected = nearest_lists(lists, round_to_grid(grid.project(queries)), 4)
    dims = len(index.projection)
    coarse = queries.float() @ tensors.stacked[dims:].float().T - tensors.shift[dims:]
    found = torch.topk(coarse, 4, largest=False).indices
    assert share_found(found, expected) > 0.97
    assert (found[:, 0] == expected[:, 0]).float().mean() > 0.97


@pytest.mark.slow
def test_an_index_of_real_numbers() -> None:
    """Where distances are rounded, nearly all places are the same."""
    keys, queries = split(clustered(600, 40).to(DEVICE), queries=SMALL_BATCH)
    index = FastIndex.build(keys, IndexConfig(kind="fast", probes=1))
    values = PackedValues.of(randn(len(keys), 8), 8)
    expected = index.estimate(queries, 3)
    fused_layer = FusedRecall(index, values, 0.1 * WIDTHS, KernelConfig(3, index.probes))
    distance, places = fused_layer.search(queries, 3)
    assert (places == expected[1]).float().mean() > 0.9
    torch.testing.assert_close(distance, expected[0], rtol=0.02, atol=0.02)


def test_the_index_and_the_kernels_share_the_projection() -> None:
    layer = Layer(LayerCase(queries=2, k=3))
    before = layer.index.estimate(layer.inputs, 3)
    fused_layer = layer.fused()
    assert layer.index.projection.data_ptr() == fused_layer.stacked.data_ptr()
    for one, other in zip(layer.index.estimate(layer.inputs, 3), before, strict=True):
        assert torch.equal(one, other)
    assert not fused_layer.state_dict()


@pytest.mark.slow
def test_kernels_replace_the_estimates() -> None:
    layer = Layer(LayerCase(queries=3, k=3))
    expected = layer.index.search(layer.inputs, 3)
    layer.index.kernel_search = layer.fused().search
    distance, places = layer.index.search(layer.inputs, 3)
    assert torch.equal(places, expected[1])
    torch.testing.assert_close(distance, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "queries"), [("eager", 1), ("aot_eager", SMALL_BATCH)])
@pytest.mark.usefixtures("compiled_state")
def test_compiled_code_recalls_and_finds_the_same(backend: str, queries: int) -> None:
    layer = Layer(LayerCase(queries=queries, k=1, probes=1, padded=True))
    fused_layer = layer.fused()
    compiled = torch.compile(fused_layer, backend=backend, fullgraph=True)
    mixed, weight = check_recall(layer, compiled)
    expected = fused_layer(layer.inputs, layer.logits, no_counts(), layer.real)
    assert torch.equal(mixed, expected[0])
    assert torch.equal(weight, expected[1])
    finds = torch.compile(lambda x: fused_layer.search(x, 2), backend=backend, fullgraph=True)
    for one, other in zip(finds(layer.inputs), fused_layer.search(layer.inputs, 2), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_the_operators_for_compiled_graphs() -> None:
    layer = Layer(LayerCase(queries=1, k=1, probes=1))
    tensors, config = list(layer.tensors()), list(layer.config)
    real = torch.ones(1, dtype=torch.bool, device=DEVICE)
    arguments = layer.inputs, layer.logits, no_counts(), real, tensors, config
    torch.library.opcheck(torch.ops.knn_moe.recall, arguments)
    checks = "test_schema", "test_faketensor"
    arguments = layer.inputs, tensors, config
    torch.library.opcheck(torch.ops.knn_moe.search, arguments, test_utils=checks)


def test_the_operator_for_logits_that_are_not_contiguous() -> None:
    layer = Layer(LayerCase(queries=SMALL_BATCH, k=1, probes=1))
    logits = layer.logits.T.contiguous().T
    arguments = layer.inputs, logits, no_counts(), None, list(layer.tensors()), list(layer.config)
    torch.library.opcheck(torch.ops.knn_moe.recall, arguments, test_utils="test_faketensor")


def test_where_kernels_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fused.kernels_usable(torch.device("cpu"), 1)
    assert fused.kernels_usable(torch.device("cuda"), BINS)
    assert not fused.kernels_usable(torch.device("cuda"), BINS + 1)
    monkeypatch.setattr(fused, "has_triton", lambda: False)
    assert not fused.kernels_usable(torch.device("cuda"), 1)
