"""`knn-moe bench retrieval` on tiny sizes: its output, its errors, and its floor by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import pytest
import torch
from click.testing import Result

from helpers.commands import run_cli
from knn_moe.bench import floor, keys, steps, timing
from knn_moe.bench.floor import Rates, Reads, count_reads, search_floor
from knn_moe.bench.models import random_model
from knn_moe.bench.search import describe_index, parse_index
from knn_moe.bench.steps import ALONE, StepBench, StepMeasure
from knn_moe.errors import ConfigError
from knn_moe.index import FastIndex, IndexConfig, build_index
from knn_moe.routers.find import find_routers
from knn_moe.routers.intercept import find_hook
from knn_moe.support.progress import OnProgress

CPU = torch.device("cpu")
LAYER = ("--keys", 2000, "--width", 64)
MODEL = ("--shape", "small", "--layers", 2, "--keys", 500, "--prefill", 32, "--batch", 1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as little as possible: no test looks at how long anything took."""
    monkeypatch.setattr(timing, "_SECONDS", 0)
    monkeypatch.setattr(timing, "_ROUNDS", (1, 1))
    monkeypatch.setattr(floor, "_COPIED_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(floor, "_SQUARE", {"cpu": 64})
    monkeypatch.setattr(steps, "_PROMPT", 4)
    for name in ("_WARM_UP", "_STEPS", "_ROUNDS", "_TRIES", "_TURNS"):
        monkeypatch.setattr(steps, name, 1)


@pytest.fixture(autouse=True, scope="module")
def _one_thread_of_faiss() -> Iterator[None]:
    """Threads wait for each other on busy cores, many times longer than this work takes."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


def retrieval(*arguments: object) -> Result:
    words = ["bench", "retrieval", "--device", "cpu", *(str(part) for part in arguments)]
    return run_cli(*words)


def in_json(*arguments: object) -> dict[str, Any]:
    result = retrieval(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def assert_refused(result: Result, *says: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert all(part in " ".join(result.stderr.split()) for part in says), result.stderr


@pytest.mark.slow
def test_a_layer_alone() -> None:
    found = in_json(*LAYER, "--grow", 500)
    names = ["exact", "faiss-flat", "ivfpq", "ivfpq,rerank", "fast", "fast,dims=64,rerank"]
    places = [(row["keys"], row["index"], row["batch"]) for row in found["rows"]]
    assert places == [
        (size, name, batch) for size in (500, 2000) for name in names for batch in (1, 64)
    ]
    exact = {(row["keys"], row["batch"]): row for row in found["rows"] if row["index"] == "exact"}
    for row in found["rows"]:
        base = exact[row["keys"], row["batch"]]
        assert row["times_exact"] == pytest.approx(base["microseconds"] / row["microseconds"])
        assert row["times_floor"] == pytest.approx(row["microseconds"] / row["floor_microseconds"])
        assert row["floor_microseconds"] > 0
        assert 0 <= row["recall"] <= 1
    assert all(row["recall"] == 1 and row["bytes_per_key"] == 256 for row in exact.values())
    assert found["settings"]["sizes"] == [500, 2000]
    assert found["versions"]["torch"]
    assert "cores" in found["machine"]


def test_a_layer_in_a_table() -> None:
    result = retrieval(*LAYER, "--index", "fast,dims=64,rerank", "--batch", 3, "-k", 2)
    assert result.exit_code == 0
    for words in ("exact", "fast,dims=64,rerank", "2,000", "recall", "64 wide", "GB/s"):
        assert words in result.stdout
    assert "ivfpq" not in result.stdout


@pytest.mark.slow
def test_a_running_model() -> None:
    found = in_json(*MODEL, "--no-compile", "--batch", 2, "--prototypes", 64, "--memories", 3)
    whats = ["prefill of 32 tokens", "decode, batch 1, eager", "decode, batch 2, eager"]
    recommended = (
        "distilled, P = 64",
        "3 × distilled, P = 64",
        "fast, K = 32",
        "fast, K = 32, head of 64",
    )
    compared = (ALONE, "exact, K = 32", "fast, K = 1")
    assert {(row["what"], row["memory"]) for row in found["rows"]} == {
        (what, memory) for what in whats for memory in (*recommended, *compared)
    }
    assert list(found["settings"]["uses"]) == [*recommended, *compared[1:]]
    alone = {row["what"]: row for row in found["rows"] if row["memory"] == ALONE}
    for row in found["rows"]:
        base = alone[row["what"]]["milliseconds"]
        assert row["times_alone"] == pytest.approx(row["milliseconds"] / base)
        assert row["gigabytes"] is None  # on a CPU
    assert found["settings"]["keys"] == 500


@pytest.mark.slow
def test_compiled_steps_are_left_out_on_a_cpu() -> None:
    result = retrieval(*MODEL, "--index", "exact")
    assert result.exit_code == 0
    assert "need a GPU" in result.stderr
    assert "compiled" not in result.stdout
    assert "over the model alone" in result.stdout
    assert "need a GPU" not in retrieval(*MODEL, "--index", "exact", "--no-compile").stderr


@pytest.mark.slow
def test_plots(tmp_path: Path) -> None:
    layer, model = tmp_path / "layer.svg", tmp_path / "model.png"
    result = retrieval(*LAYER, "--index", "fast", "--grow", 500, "--plot", layer)
    assert result.exit_code == 0
    result = retrieval(*MODEL, "--no-compile", "--index", "exact", "--plot", model)
    assert result.exit_code == 0
    assert layer.read_bytes().startswith(b"<?xml")
    assert model.read_bytes().startswith(b"\x89PNG")


def test_memory_is_plotted_where_it_was_measured(tmp_path: Path) -> None:
    from knn_moe.bench.plot import plot_steps

    same = {"what": "prefill", "alone_milliseconds": 1.0, "alone_gigabytes": 1.0}
    alone = StepMeasure(memory=ALONE, milliseconds=1.0, gigabytes=1.0, **same)
    other = StepMeasure(memory="fast, K = 1", milliseconds=0.9, gigabytes=1.03, **same)
    assert other.memory_times_alone == pytest.approx(1.03)
    plot_steps([alone, other], tmp_path / "plot.svg")
    assert "memory" in (tmp_path / "plot.svg").read_text(encoding="utf8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--index", "quick"), "Unknown index 'quick'. Available: exact"),
        (("--index", "fast,size=3"), "Unknown index option 'size'."),
        (("--index", "fast,dims"), "dims of index 'fast,dims' must be a whole number, got ''."),
        (("--index", "fast,dims=x"), "must be a whole number, got 'x'"),
        (("--index", "fast,dims=65"), "dims of fast must be a multiple of 64, got 65."),
        (("--index", "fast,bits=5"), "bits must be 4 or 8, got 5."),
        (("--index", "ivfpq,probes=0"), "probes must be a whole number of at least 1"),
        (("--index", "ivfpq,rerank=no"), "rerank takes no value"),
        (("--index", "fast,dims=64,dims=128"), "sets dims twice"),
        (("--index", ""), "Unknown index ''"),
        (("--shape", "llama"), "Unknown shape 'llama'."),
        (("--shape", "small", "--layers", 0), "layers must be 1 to 6 for small, got 0."),
        (("--shape", "small", "--layers", 7), "layers must be 1 to 6 for small, got 7."),
        (("--shape", "small", "--grow", 7), "--grow has an effect only without --shape."),
        (("--layers", 1), "--layers has an effect only with --shape."),
        ((*MODEL, "--prototypes", 501), "500 keys has no 501 prototypes"),
        (("--prototypes", 64), "--prototypes has an effect only with --shape."),
        (("--no-compile",), "--no-compile has an effect only with --shape."),
        (("--keys", 0), "0 is not in the range"),
        (("--batch", 0), "0 is not in the range"),
        (("--plot", "picture.doc"), "A plot is written as .svg or .png, got 'picture.doc'."),
        (("--plot", "nowhere/picture.svg"), "There is no folder 'nowhere'"),
    ],
)
def test_refusals(arguments: tuple[object, ...], says: str) -> None:
    assert_refused(retrieval(*arguments), says)


def test_without_faiss_its_rows_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    result = retrieval(*LAYER, "--batch", 1, "--json")
    found = [row["index"] for row in json.loads(result.stdout)["rows"]]
    assert found == ["exact", "fast", "fast,dims=64,rerank"]
    assert "Left out: faiss-flat; ivfpq; ivfpq,rerank." in result.stderr
    assert "pip install faiss-cpu" in result.stderr
    assert_refused(retrieval(*LAYER, "--index", "ivfpq"), "pip install faiss-cpu")


def test_without_matplotlib_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert_refused(retrieval("--plot", "picture.svg"), "pip install matplotlib")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConfigError("Enough.")])
def test_measurements_are_shown_when_a_later_one_fails(
    error: BaseException | type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(bench: StepBench, on_progress: OnProgress) -> Iterator[StepMeasure]:
        yield StepMeasure(
            what="prefill",
            memory=ALONE,
            milliseconds=3.0,
            alone_milliseconds=3.0,
            gigabytes=None,
            alone_gigabytes=None,
        )
        raise error

    monkeypatch.setattr(steps, "measure_steps", measure)
    result = retrieval(*MODEL, "--no-compile", "--index", "exact", "--json")
    assert result.exit_code != 0
    assert [row["milliseconds"] for row in json.loads(result.stdout)["rows"]] == [3.0]


@pytest.mark.parametrize("spec", ["exact", "fast,dims=128,value_bits=4", "ivfpq,probes=64,rerank"])
def test_an_index_is_read_as_it_is_shown(spec: str) -> None:
    assert describe_index(parse_index(spec)) == spec


def test_spaces_and_default_options_are_ignored() -> None:
    assert parse_index(" fast , dims = 64, probes=16") == IndexConfig(kind="fast", dims=64)


def test_floor_of_the_exact_search() -> None:
    """1,000 keys × 8 in fp32 are 32,000 bytes; a query takes 2 · 8,000 operations."""
    held = torch.zeros(1000, 8)
    reads = count_reads(build_index(held, IndexConfig(), CPU), IndexConfig(), held, 1)
    one = search_floor(reads, 1, Rates(32e3, 16e3))
    assert (one.reading, one.arithmetic) == (1.0, 1.0)
    many = search_floor(reads, 64, Rates(32e3, 16e3))
    assert (many.reading, many.seconds, many.bound) == (1.0, 64.0, "sums")
    assert search_floor(reads, 1, Rates(16e3, 16e3)).bound == "bytes"
    half = count_reads(
        build_index(held, IndexConfig(), CPU), IndexConfig(kind="faiss-flat"), held, 1
    )
    assert half.key_bytes == 16e3


def test_floor_of_lists() -> None:
    """A query looks into a quarter of 4,000 bytes; two look into 7/16 of them; many into all."""
    reads = Reads(4000, 8000, 0.25, other_bytes=100, other_numbers=50, query_bytes=10)
    rates = Rates(1.0, 1.0)
    assert search_floor(reads, 1, rates) == (100 + 1000 + 10, 2 * (50 + 2000))
    assert search_floor(reads, 2, rates) == (100 + 1750 + 20, 4 * (50 + 2000))
    assert search_floor(reads, 1000, rates).reading == pytest.approx(100 + 4000 + 10_000)


def test_floor_of_fast_and_ivfpq() -> None:
    held = keys.made_up_keys(2000, 64, seed=0, device=CPU, dtype=torch.float32)
    config = IndexConfig(kind="fast", probes=2, rerank=True)
    index = build_index(held, config, CPU)
    assert isinstance(index, FastIndex)
    lists = len(index.centres)
    reads = count_reads(index, config, held, 1)
    assert reads.key_bytes == 2000 * (32 + 4)  # 64 numbers of four bits, and a norm
    assert reads.share == 2 / lists
    assert reads.other_bytes == 64 * 64 * 4 + lists * 64
    assert reads.query_bytes == 16 * 64 * 4
    config = IndexConfig(kind="ivfpq", probes=17)
    reads = count_reads(build_index(held, config, CPU), config, held, 1)
    assert reads.key_bytes == 2000 * 8  # an eighth of the width, a byte each
    assert reads.share == 17 / 51  # lists of at least 39 keys
    assert reads.other_bytes == 4 * (64 * 8 + 51 * 8)


def test_keys_are_the_models_own_router_inputs() -> None:
    model = random_model("small", CPU, torch.float32, layers=2)
    memory = keys.record_memory(model, 700)
    routers = find_routers(model)
    assert all(find_hook(router) is None for router in routers)
    assert sorted(memory.layers) == [router.layer for router in routers]
    assert memory.provenance.begin.tolist() == [0, 512, 700]
    seen: list[torch.Tensor] = []
    gate = routers[1].module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(memory.provenance.stream[None, :512].long())
    gate.remove()
    layer = memory.full_layers()[1]
    assert (layer.keys.shape, layer.values.shape) == ((700, 192), (700, 16))
    torch.testing.assert_close(layer.keys[:512], seen[0].reshape(-1, 192), rtol=1e-4, atol=1e-4)
    assert layer.keys[512:].abs().sum(dim=-1).min() > 0
    own = layer.keys @ routers[1].weight.detach().T
    assert float((layer.values - own).std()) == pytest.approx(0.1, rel=0.1)
    assert 0 < layer.gamma < float("inf")
