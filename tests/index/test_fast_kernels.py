"""The kernels of `fast` against plain torch: FastIndex.estimate, PackedValues.at and mixing.py.

Without a GPU triton's interpreter runs them (conftest.py asks for it). Most indexes here lie on a
grid on which every number is whole, so that nothing is rounded and the places found must be the
same.
"""

from __future__ import annotations

import pytest
import torch

from helpers.kernel_layers import (
    CUDA,
    DEVICE,
    KERNEL,
    LISTS,
    Case,
    Layer,
    check_recall,
    dtypes_of,
    no_counts,
    randn,
)
from helpers.points import clustered, split
from knn_moe.equations.mixing import confidence, mix_logits, propose_logits
from knn_moe.equations.similarity import rbf
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


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several lists to a program: the interpreter, too, is slow at what every program does."""
    monkeypatch.setattr(launch, "_PROGRAMS", 2)


@pytest.fixture(params=["some", "many"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """More than a few queries: each looks into its lists, or lists serve the queues before them."""
    if request.param == "many":
        monkeypatch.setattr(launch, "_SMALL_BATCH", 0)
    name: str = request.param
    return name


FEW_QUERIES = [
    Case(queries=1, k=1, value_bits=4, probes=1, top=0),
    Case(queries=1, k=16, bits=8, dims=128, experts=7, probes=3, cosine=1),
    Case(queries=3, k=2, bits=8, value_bits=4, experts=60, width=64, top=8, padded=True),
    Case(queries=1, k=4, value_bits=4, experts=7, width=201, dims=192, probes=1, cosine=1),
    Case(queries=DECODE_QUERIES, k=1, probes=1),
    Case(queries=1, k=3, experts=1, probes=100, top=1),
]
SOME_QUERIES = [
    Case(
        queries=DECODE_QUERIES + 1, k=1, bits=8, value_bits=4, experts=7, dims=128, cosine=1, top=3
    ),
    Case(
        queries=DECODE_QUERIES + 1,
        k=4,
        width=201,
        dims=192,
        experts=60,
        probes=1,
        top=0,
        padded=True,
    ),
    Case(queries=DECODE_QUERIES + 1, k=16, value_bits=4, experts=9, probes=1, top=9),
    Case(queries=20, k=1, bits=8, experts=2, probes=1, top=1, padded=True),
]
MANY_QUERIES = [
    Case(queries=DECODE_QUERIES + 1, k=16, bits=8, width=64, experts=60, probes=4, top=8),
    Case(
        queries=DECODE_QUERIES + 1,
        k=1,
        value_bits=4,
        experts=7,
        width=201,
        dims=192,
        probes=100,
        cosine=1,
    ),
    Case(queries=20, k=3, bits=8, dims=128, experts=9, probes=2, top=4, padded=True),
]


@pytest.mark.parametrize("case", FEW_QUERIES, ids=str)
def test_recall_for_a_few_queries(case: Case) -> None:
    layer = Layer(case)
    launcher = DecodeLauncher(layer.tensors(), layer.config)
    check_recall(layer, launcher)


def test_a_program_for_each_list_and_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_PROGRAMS", 100)
    layer = Layer(Case(queries=1, k=2))
    launcher = DecodeLauncher(layer.tensors(), layer.config)
    assert launcher.programs >= len(LISTS)
    mixed, weight = check_recall(layer, launcher)
    again = launcher(layer.inputs, layer.logits, no_counts(), None)
    assert torch.equal(again[0], mixed)
    assert torch.equal(again[1], weight)


@pytest.mark.parametrize("case", SOME_QUERIES, ids=str)
def test_recall_for_some_queries(case: Case) -> None:
    layer = Layer(case)
    check_recall(layer, layer.recall)


@pytest.mark.parametrize("case", MANY_QUERIES, ids=str)
def test_recall_for_many_queries(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_SMALL_BATCH", DECODE_QUERIES)
    layer = Layer(case)
    check_recall(layer, layer.recall)


@pytest.mark.parametrize(("name", "dtype"), [*dtypes_of("few"), *dtypes_of("some")])
def test_recall_in_half_precision(name: str, dtype: torch.dtype) -> None:
    layer = Layer(Case(queries=1 if name == "few" else 9, k=2, probes=1), dtype)
    check_recall(layer, layer.recall)


def test_more_queries_than_are_served_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_AT_ONCE", 3)
    layer = Layer(Case(queries=DECODE_QUERIES + 1, k=1, probes=1, padded=True))
    check_recall(layer, layer.recall)
    _, places = search(layer.inputs, layer.tensors(), layer.config)
    assert torch.equal(places, layer.index.estimate(layer.inputs, 1)[1])


@pytest.mark.parametrize(
    "case",
    [
        Case(queries=1, k=1),
        Case(queries=2, k=16, bits=8, dims=128, probes=1),
        Case(queries=DECODE_QUERIES + 1, k=3, bits=8, width=201, dims=192, probes=2),
        Case(queries=DECODE_QUERIES + 1, k=4, width=64, probes=1),
    ],
    ids=str,
)
def test_places_and_distances(case: Case, path: str) -> None:
    layer = Layer(case)
    distance, places = search(layer.inputs, layer.tensors(), layer.config)
    expected, expected_places = layer.index.estimate(layer.inputs, case.k)
    assert (distance.dtype, places.dtype) == (torch.float32, torch.int64)
    assert torch.equal(places, expected_places)
    torch.testing.assert_close(distance, expected, rtol=1e-5, atol=1e-5)


def test_with_nothing_to_correct_distances_are_the_same_to_the_last_bit(path: str) -> None:
    layer = Layer(Case(queries=DECODE_QUERIES + 1, k=2, probes=1))
    layer.index.correction.zero_()
    distance, _ = search(layer.inputs, layer.tensors(), layer.config)
    assert torch.equal(distance, layer.index.estimate(layer.inputs, 2)[0])


def test_neighbours_that_a_list_does_not_have(path: str) -> None:
    layer = Layer(Case(queries=2, k=5, probes=1))
    layer.inputs = layer.on_grid(layer.centres[[3, 0]])
    distance, places = search(layer.inputs, layer.tensors(), layer.config)
    expected, expected_places = layer.index.estimate(layer.inputs, 5)
    assert expected.isinf().sum(dim=-1).tolist() == [4, 2]
    assert torch.equal(places, expected_places)
    torch.testing.assert_close(distance, expected, rtol=1e-5, atol=1e-5)


def test_neighbours_that_a_list_does_not_have_weigh_nothing() -> None:
    layer = Layer(Case(queries=1, k=5, probes=1))
    layer.inputs = layer.on_grid(layer.centres[[0]])
    _, weight = check_recall(layer, layer.recall)
    assert 0 < weight.item() <= 3 / 5


def test_as_many_neighbours_as_there_are_bins() -> None:
    layer = Layer(Case(queries=1, k=BINS, probes=1))
    _, places = search(layer.inputs, layer.tensors(), layer.config)
    assert torch.equal(places, layer.index.estimate(layer.inputs, BINS)[1])


def test_of_equal_keys_the_first_places_are_found(path: str) -> None:
    layer = Layer(Case(queries=2, k=4, probes=100))
    layer.index.codes[:] = layer.index.codes[0]
    layer.index.norms[:] = layer.index.norms[0]
    _, places = search(layer.inputs, layer.tensors(), layer.config)
    assert places.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("queries", [1, DECODE_QUERIES + 1])
@pytest.mark.parametrize("far", [1e2, 1e15])
def test_a_query_far_from_everything_keeps_its_logits(far: float, queries: int) -> None:
    layer = Layer(Case(queries=queries, k=2, probes=1))
    layer.inputs = far * randn(queries, 33)
    mixed, weight = layer.recall(layer.inputs, layer.logits, no_counts(), None)
    assert weight.eq(0).all()
    assert torch.equal(mixed, layer.logits)


@pytest.mark.parametrize("queries", [1, DECODE_QUERIES + 1])
def test_where_no_neighbour_is_similar_the_logits_are_kept(queries: int) -> None:
    layer = Layer(Case(queries=queries, k=2, probes=1, cosine=1))
    layer.inputs = -layer.inputs * 3
    mixed, weight = layer.recall(layer.inputs, layer.logits, no_counts(), None)
    assert weight.eq(0).all()
    assert torch.equal(mixed, layer.logits)


@pytest.mark.parametrize("queries", [1, DECODE_QUERIES + 1])
def test_experts_with_equal_logits_are_chosen_from_the_first_on(queries: int) -> None:
    """Nothing changes while ties stay ties; a logit that leaves a tie changes the choice."""
    layer = Layer(Case(queries=queries, k=1, probes=1, experts=5, top=2))
    layer.logits = torch.tensor([[0.0, 1, 0, 0, 0]], device=DEVICE).expand(queries, -1)
    for proposed, moved in ([9.0, 1, 0, 0, 0], 0), ([0.0, 1, 0, 0, 9], queries):
        values = torch.tensor([proposed], device=DEVICE).expand(len(layer.index.codes), -1)
        layer.values, counts = PackedValues.of(values, 8), no_counts()
        _, weight = layer.recall(layer.inputs, layer.logits, counts, None)
        assert weight.gt(0).all()
        assert counts[2] == moved


def test_no_queries() -> None:
    layer, counts = Layer(Case(queries=0, k=2)), no_counts()
    mixed, weight = layer.fused()(layer.inputs, layer.logits, counts, None)
    assert (mixed.shape, weight.shape) == ((0, 8), (0,))
    assert counts.tolist() == [1, 0, 0, 0]
    distance, places = layer.fused().search(layer.inputs, 2)
    assert distance.shape == places.shape == (0, 2)


@pytest.mark.parametrize("queries", [2, DECODE_QUERIES + 1])
def test_inputs_that_are_not_contiguous_and_logits_that_are_not_aligned(queries: int) -> None:
    layer = Layer(Case(queries=queries, k=1, probes=1))
    layer.inputs = layer.inputs.T.contiguous().T
    logits = torch.cat([layer.logits.new_zeros(1), layer.logits.flatten()])
    layer.logits = logits[1:].view(queries, -1)
    check_recall(layer, layer.fused())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of what is no number
@pytest.mark.parametrize("queries", [2, DECODE_QUERIES + 1])
def test_a_query_that_is_no_number_leaves_the_others_alone(queries: int, path: str) -> None:
    """Now, and in calls to come: a list is probed once, whatever its distance."""
    if queries <= DECODE_QUERIES and path == "many":
        pytest.skip("a few queries go one way")
    layer = Layer(Case(queries=queries, k=1, probes=2))
    fused_layer, (expected, _) = layer.fused(), layer.expected()
    broken = layer.inputs.clone()
    broken[1] = float("nan")
    others = torch.arange(queries, device=DEVICE) != 1
    found, _ = fused_layer(broken, layer.logits, no_counts(), None)
    torch.testing.assert_close(found[others], expected[others], rtol=1e-4, atol=1e-4)
    check_recall(layer, fused_layer)


# KernelTensors, and the module that holds them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parts_are_finite_but_for_the_lists_that_are_never_near(dtype: torch.dtype) -> None:
    keys = (0.1 * clustered(1000, 200)).to(DEVICE, dtype)
    index = FastIndex.build(keys, IndexConfig(kind="fast"))
    tensors = prepare_tensors(index, PackedValues.of(randn(1000, 8), 8), KERNEL)
    assert tensors.stacked.isfinite().all()
    real = len(index.projection) + len(index.centres)
    assert tensors.shift[:real].isfinite().all()
    assert tensors.shift[real:].isneginf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_coarse_distances_order_the_lists_as_grid_points_do(
    offset: float, dtype: torch.dtype
) -> None:
    """But for near ties; and whatever all keys have in common does not count."""
    points = clustered(4000, 100) + offset * torch.randn(100)
    keys, queries = split(points.to(DEVICE, dtype), queries=200)
    index = FastIndex.build(keys, IndexConfig(kind="fast", probes=4))
    tensors = prepare_tensors(index, PackedValues.of(randn(len(keys), 8), 8), KERNEL)
    grid = Grid(index.projection, index.offset, index.centre, index.step)
    lists = Lists(index.codes, index.norms, index.centres, index.coarse_norms, index.begin)
    expected = nearest_lists(lists, round_to_grid(grid.project(queries)), 4)
    dims = len(index.projection)
    coarse = queries.float() @ tensors.stacked[dims:].float().T - tensors.shift[dims:]
    found = torch.topk(coarse, 4, largest=False).indices
    assert (found[:, :, None] == expected[:, None]).any(dim=-1).float().mean() > 0.97
    assert (found[:, 0] == expected[:, 0]).float().mean() > 0.97


def test_an_index_of_real_numbers() -> None:
    """Where distances are rounded, nearly all places are the same, and so is the mixing."""
    keys, queries = split(clustered(600, 40).to(DEVICE), queries=DECODE_QUERIES + 1)
    index = FastIndex.build(keys, IndexConfig(kind="fast", probes=1))
    values = PackedValues.of(randn(len(keys), 8), 8)
    expected = index.estimate(queries, 3)
    fused_layer = FusedRecall(index, values, 0.1 * KERNEL, KernelConfig(3, index.probes))
    distance, places = fused_layer.search(queries, 3)
    assert (places == expected[1]).float().mean() > 0.9
    torch.testing.assert_close(distance, expected[0], rtol=0.02, atol=0.02)


def test_the_index_and_the_kernels_share_the_projection() -> None:
    layer = Layer(Case(queries=2, k=3))
    before = layer.index.estimate(layer.inputs, 3)
    fused_layer = layer.fused()
    assert layer.index.projection.data_ptr() == fused_layer.stacked.data_ptr()
    for one, other in zip(layer.index.estimate(layer.inputs, 3), before, strict=True):
        assert torch.equal(one, other)
    assert not fused_layer.state_dict()


def test_kernels_in_place_of_the_estimates() -> None:
    layer = Layer(Case(queries=3, k=3))
    expected = layer.index.search(layer.inputs, 3)
    layer.index.kernel_search = layer.fused().search
    distance, places = layer.index.search(layer.inputs, 3)
    assert torch.equal(places, expected[1])
    torch.testing.assert_close(distance, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("backend", "queries"), [("eager", 1), ("aot_eager", DECODE_QUERIES + 1)])
@pytest.mark.usefixtures("compiled_state")
def test_compiled_code_recalls_and_finds_the_same(backend: str, queries: int) -> None:
    layer = Layer(Case(queries=queries, k=1, probes=1, padded=True))
    fused_layer = layer.fused()
    compiled = torch.compile(fused_layer, backend=backend, fullgraph=True)
    mixed, weight = check_recall(layer, compiled)
    expected = fused_layer(layer.inputs, layer.logits, no_counts(), layer.real)
    assert torch.equal(mixed, expected[0])
    assert torch.equal(weight, expected[1])
    search = torch.compile(
        lambda asked: fused_layer.search(asked, 2), backend=backend, fullgraph=True
    )
    for one, other in zip(search(layer.inputs), fused_layer.search(layer.inputs, 2), strict=True):
        assert torch.equal(one, other)


def test_the_operators_for_compiled_graphs() -> None:
    layer = Layer(Case(queries=1, k=1, probes=1))
    tensors, config = list(layer.tensors()), list(layer.config)
    real = torch.ones(1, dtype=torch.bool, device=DEVICE)
    asked = layer.inputs, layer.logits, no_counts(), real, tensors, config
    torch.library.opcheck(torch.ops.knn_moe.recall, asked)
    found = "test_schema", "test_faketensor"
    asked = layer.inputs, tensors, config
    torch.library.opcheck(torch.ops.knn_moe.search, asked, test_utils=found)


def test_the_operator_for_logits_that_are_not_contiguous() -> None:
    layer = Layer(Case(queries=DECODE_QUERIES + 1, k=1, probes=1))
    logits = layer.logits.T.contiguous().T
    asked = layer.inputs, logits, no_counts(), None, list(layer.tensors()), list(layer.config)
    torch.library.opcheck(torch.ops.knn_moe.recall, asked, test_utils="test_faketensor")


def test_where_kernels_can_be_used() -> None:
    assert not fused.kernels_usable(torch.device("cpu"), 1)
    assert fused.kernels_usable(torch.device("cuda"), BINS)
    assert not fused.kernels_usable(torch.device("cuda"), BINS + 1)


def test_no_kernels_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_has_triton", lambda: False)
    assert not fused.kernels_usable(torch.device("cuda"), 1)


# At the size of a real memory


@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_many_lists_on_a_gpu(bits: int, dtype: torch.dtype) -> None:
    """Lists at the edge of what is probed may differ; the same call gives the same again."""
    keys, queries = split(clustered(59_000, 512, clusters=300).to(DEVICE, dtype), queries=9000)
    index = FastIndex.build(keys, IndexConfig(kind="fast", bits=bits))
    values, logits = PackedValues.of(randn(len(keys), 64), 8), randn(9000, 64).to(dtype)
    distance, places = index.estimate(queries, 8)
    kernel = torch.stack([1 / distance.median(), 0.5 / distance.median(), KERNEL[2]])
    proposal = propose_logits(values.at(places), rbf(distance, kernel[0]))
    weight = kernel[2] * confidence(rbf(distance, kernel[1]))
    expected = mix_logits(logits.float(), proposal, weight)
    layer = FusedRecall(index, values, kernel, KernelConfig(8, index.probes, 0, 8))
    for count in (1, DECODE_QUERIES, DECODE_QUERIES + 1, 100, 300, 9000):
        asked = queries[:count], logits[:count], no_counts(), None
        found = layer.search(queries[:count], 8)[1]
        assert (found == places[:count]).float().mean() > 0.9
        mixed, _ = layer(*asked)
        near = torch.isclose(mixed.float(), expected[:count], rtol=1e-2, atol=2e-2)
        assert near.float().mean() > 0.9
        for _ in range(10):
            assert torch.equal(layer(*asked)[0], mixed)
