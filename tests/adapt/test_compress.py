"""A memory with an index in its keys' place: an artefact as safe as the full one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.indexed import CPU, FAST, MANY, logits, of_rows, run, uneven
from helpers.zoo import BUILD, encode, family, make_texts
from knn_moe import (
    IndexConfig,
    RoutingConfig,
    RoutingMemory,
    attach,
    build_memory,
    compress,
    find_routers,
)
from knn_moe.adapt import compress as module
from knn_moe.adapt.compress import compress_layer, measure_index
from knn_moe.adapt.controls import shuffle_values
from knn_moe.bench.keys import made_up_keys
from knn_moe.errors import (
    ConfigError,
    MemoryFormatError,
    MemoryMismatchError,
    MissingDependencyError,
)
from knn_moe.index import ExactIndex
from knn_moe.memory.compressed import CompressedLayer, IndexQuality
from knn_moe.memory.layers import LayerMemory
from knn_moe.recall.neighbours import Widths
from knn_moe.support.progress import Progress


@pytest.fixture(scope="module")
def uneven_model() -> PreTrainedModel:
    return uneven()


@pytest.fixture(scope="module")
def uneven_memory(zoo_tokenizer: object) -> RoutingMemory:
    return build_memory(uneven(), zoo_tokenizer, MANY, BUILD)


@pytest.fixture(scope="module")
def small(uneven_memory: RoutingMemory, tmp_path_factory: pytest.TempPathFactory) -> RoutingMemory:
    return compress(uneven_memory, FAST, tmp_path_factory.mktemp("memories") / "small")


@pytest.fixture(scope="module")
def ids(zoo_tokenizer: Any) -> Tensor:
    texts = make_texts(6, seed=5, shortest=9, longest=9)
    return torch.cat([encode(zoo_tokenizer, text) for text in texts])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "times"), [("fast", 3.5), ("ivfpq", 3), ("faiss-flat", 1.6)])
def test_it_is_smaller(
    kind: str, times: float, uneven_memory: RoutingMemory, tmp_path: Path
) -> None:
    keys = made_up_keys(2000, 256, seed=0, device=CPU, dtype=torch.float32)
    layer = LayerMemory(keys, torch.randn(2000, 64), gamma=1.0)
    provenance = replace(
        uneven_memory.provenance, key=uneven_memory.provenance.key[:1].repeat(2000)
    )
    full = replace(uneven_memory, layers={0: layer}, provenance=provenance, folder=None)
    made = compress(full, kind, tmp_path / "made")
    assert len(made) == len(made.layers[0]) == 2000
    assert made.nbytes == made.layers[0].nbytes < full.nbytes / times
    assert made.nbytes < sum(file.stat().st_size for file in (tmp_path / "made").iterdir())
    assert made.layers[0].bytes_per_case == pytest.approx(made.nbytes / 2000)
    assert made.layers[0].shape == layer.shape
    assert f"2,000 cases as {kind}, " in repr(made.layers[0])
    assert "2,000 cases" in repr(made)
    assert "compressed" in repr(made)
    assert "compressed" not in repr(full)
    assert made.compressed
    assert not full.compressed
    assert made.layers[0].quality.recall > 0.3


def test_opened_tensors_are_aligned(tmp_path: Path, uneven_memory: RoutingMemory) -> None:
    odd = of_rows(uneven_memory, torch.arange(7))
    compress(odd, "ivfpq", tmp_path / "made")
    made = RoutingMemory.from_pretrained(tmp_path / "made")
    tensors = [*made.layers[0].tensors.values(), *vars(made.provenance).values()]
    assert {tensor.dtype.itemsize for tensor in tensors} == {1, 4, 8}
    for tensor in tensors:
        assert tensor.data_ptr() % tensor.dtype.itemsize == 0


def test_another_models_is_refused_by_name(small: RoutingMemory) -> None:
    other = family("olmoe")
    with torch.no_grad():
        find_routers(other)[0].weight.mul_(1.5)
    other.config._name_or_path = "somebody/elses-olmoe"
    with pytest.raises(MemoryMismatchError, match=r"OlmoeForCausalLM.*somebody/elses-olmoe"):
        attach(other, small)
    with attach(other, small, force=True):
        pass
    with pytest.raises(MemoryMismatchError, match=r"32 → 8 .* 32 → 12"):
        attach(family("longcat_flash"), small, force=True)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return changed


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("layer-001.safetensors", truncate, "truncated"),
        ("layer-001.safetensors", flip, "edited"),
        ("layer-001.safetensors", Path.unlink, "missing"),
        ("memory_config.json", truncate, "damaged"),
        (
            "memory_config.json",
            edit(lambda config: config["layers"][0]["quality"].update(recall=1.0)),
            "edited",
        ),
        (
            "memory_config.json",
            edit(lambda config: config.update(format_version=99)),
            "format 99.*Upgrade",
        ),
    ],
)
def test_one_that_is_not_whole_is_refused(
    small: RoutingMemory, tmp_path: Path, name: str, change: Callable[[Path], None], reason: str
) -> None:
    small.save_pretrained(tmp_path / "broken")
    change(tmp_path / "broken" / name)
    with pytest.raises(MemoryFormatError, match=reason) as error:
        RoutingMemory.from_pretrained(tmp_path / "broken")
    assert name in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (RoutingConfig(similarity="cosine"), "compressed for 'rbf' similarity.*'cosine'"),
        (RoutingConfig(similarity="rbf-unit"), "compressed for 'rbf' similarity.*'rbf-unit'"),
        (RoutingConfig(index="exact"), "compressed as 'fast'.*'exact'"),
        (RoutingConfig(index="ivfpq"), "compressed as 'fast'.*'ivfpq'"),
        (RoutingConfig(index=IndexConfig(kind="fast", rerank=True)), "with rerank"),
    ],
)
def test_what_it_was_not_made_for_is_refused(
    asked: RoutingConfig,
    says: str,
    uneven_model: PreTrainedModel,
    small: RoutingMemory,
    ids: Tensor,
) -> None:
    before = run(uneven_model, ids)[0]
    with pytest.raises(ConfigError, match=says) as error:
        attach(uneven_model, small, asked)
    assert "ompress the full memory again" in str(error.value)
    assert torch.equal(run(uneven_model, ids)[0], before)


def test_what_needs_keys_is_refused(
    uneven_memory: RoutingMemory, small: RoutingMemory, tmp_path: Path
) -> None:
    wanted: list[Callable[[], object]] = [
        lambda: small.merge(uneven_memory),
        lambda: uneven_memory.merge(small, folder=tmp_path / "merged"),
        lambda: shuffle_values(small),
        lambda: compress(small, FAST, tmp_path / "again"),
    ]
    for work in wanted:
        with pytest.raises(MemoryFormatError, match="Use the memory that it was made from"):
            work()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_compressed(uneven_memory: RoutingMemory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exact index is the keys themselves"):
        compress(uneven_memory, IndexConfig(), tmp_path / "made")
    with pytest.raises(ConfigError, match="Unknown index 'hnsw'"):
        compress(uneven_memory, "hnsw", tmp_path / "made")
    layer, widths = uneven_memory.full_layers()[0], Widths(1.0, 1.0)
    with pytest.raises(ConfigError, match="needs an index"):
        compress_layer(layer, 1.0, widths, RoutingConfig(), CPU)
    with pytest.raises(MemoryFormatError, match="no keys to compress"):
        compress(of_rows(uneven_memory, torch.arange(0)), FAST, tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_writing_over_something(
    uneven_memory: RoutingMemory,
    small: RoutingMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "memory"
    uneven_memory.save_pretrained(folder)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with monkeypatch.context() as patch:
        patch.setattr(module, "compress_layer", None)  # refused before any work
        with pytest.raises(MemoryFormatError, match="exists already"):
            compress(uneven_memory, FAST, folder)
        with pytest.raises(MemoryFormatError, match="will not be overwritten"):
            compress(uneven_memory, FAST, tmp_path / "thesis", overwrite=True)
    with pytest.raises(MemoryFormatError, match="exists already"):
        small.save_pretrained(folder)
    itself = RoutingMemory.from_pretrained(folder)
    made = compress(itself, FAST, folder, overwrite=True)
    assert made.compressed
    assert RoutingMemory.from_pretrained(folder).manifest == small.manifest
    made.save_pretrained(folder, overwrite=True)
    assert RoutingMemory.from_pretrained(folder).nbytes == small.nbytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory", "thesis"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_midway_leaves_nothing_behind(
    error: type[BaseException],
    uneven_memory: RoutingMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Progress] = []

    def fail_second(*arguments: Any) -> CompressedLayer:
        if done:
            raise error
        return compress_layer(*arguments)

    monkeypatch.setattr(module, "compress_layer", fail_second)
    with pytest.raises(error):
        compress(uneven_memory, FAST, tmp_path / "made", on_progress=done.append)
    assert done == [Progress("compressing", 1, 2)]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    uneven_memory.save_pretrained(tmp_path / "made")
    monkeypatch.setattr(module, "compress_layer", fail_second)
    done.clear()
    with pytest.raises(error):
        compress(uneven_memory, FAST, tmp_path / "made", overwrite=True, on_progress=done.append)
    assert not RoutingMemory.from_pretrained(tmp_path / "made").compressed
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


# How good it is said to be


class Answers:
    """An index that knows its answers by heart. Shapes: rows [T, k]."""

    def __init__(self, keys: Tensor, rows: Tensor, *, found: bool = True) -> None:
        self.keys, self.rows, self.found = keys, rows, found

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        rows = self.rows[:, :k]
        distance = (queries[:, None] - self.keys[rows]).square().sum(dim=-1)
        return distance if self.found else torch.full_like(distance, float("inf")), rows

    def tensors(self) -> dict[str, Tensor]:
        return {}


def test_quality_is_what_it_says() -> None:
    keys = torch.arange(8.0)[:, None] ** 1.5  # each nearest to the one before it, but for the first
    nearest = torch.tensor([1, 0, 1, 2, 3, 4, 5, 6])
    itself = torch.arange(8)
    config = RoutingConfig()

    def quality(*columns: Tensor, found: bool = True) -> IndexQuality:
        index = Answers(keys, torch.stack(columns, dim=1), found=found)
        return measure_index(index, keys, Widths(0.1, 0.1), config, CPU)

    assert quality(itself, nearest) == IndexQuality(recall=1, confidence_error=0)
    assert quality(nearest, itself) == IndexQuality(recall=1, confidence_error=0)
    assert quality(nearest, itself.roll(4)) == IndexQuality(recall=1, confidence_error=0)
    exact = torch.exp(-0.1 * (keys[:, 0] - keys[nearest, 0]).square())
    nothing = quality(nearest, nearest, found=False)
    assert nothing == IndexQuality(recall=0, confidence_error=round(float(exact.mean()), 5))
    half = nearest.clone()
    half[4:] = 0
    wrong = torch.exp(-0.1 * (keys[:, 0] - keys[half, 0]).square())
    error = round(float((wrong - exact).abs().mean()), 5)
    assert quality(itself, half) == IndexQuality(recall=0.5, confidence_error=error)


def test_another_key_that_is_as_near_is_a_hit() -> None:
    keys = torch.tensor([[0.0], [0.0], [0.0], [5.0], [5.0]])
    answers = Answers(keys, torch.tensor([[2, 0], [2, 0], [1, 0], [4, 3], [3, 4]]))
    assert measure_index(answers, keys, Widths(1.0, 1.0), RoutingConfig(), CPU).recall == 1
    assert (
        measure_index(ExactIndex(keys), keys, Widths(1.0, 1.0), RoutingConfig(k=9), CPU).recall == 1
    )


# Where faiss is missing


def test_without_faiss(
    uneven_model: PreTrainedModel,
    uneven_memory: RoutingMemory,
    ids: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = compress(uneven_memory, "ivfpq", tmp_path / "ivfpq")
    monkeypatch.setitem(sys.modules, "faiss", None)
    for config in (RoutingConfig(), RoutingConfig(index="fast")):
        assert logits(uneven_model, uneven_memory, config, ids).isfinite().all()
    made = compress(uneven_memory, FAST, tmp_path / "fast")
    assert logits(uneven_model, made, None, ids).isfinite().all()
    assert RoutingMemory.from_pretrained(tmp_path / "ivfpq").nbytes == kept.nbytes
    wanted: list[Callable[[], object]] = [
        lambda: attach(uneven_model, uneven_memory, RoutingConfig(index="ivfpq")),
        lambda: attach(uneven_model, uneven_memory, RoutingConfig(index="faiss-flat")),
        lambda: attach(uneven_model, kept),
        lambda: compress(uneven_memory, "ivfpq", tmp_path / "again"),
    ]
    for work in wanted:
        with pytest.raises(MissingDependencyError, match="pip install faiss-cpu"):
            work()
    assert {path.name for path in tmp_path.iterdir()} == {"ivfpq", "fast"}
