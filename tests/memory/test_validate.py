"""A memory that is whole but makes no sense is refused by name: digest and checksums are valid."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from campaigns.mutants import make_bases
from campaigns.mutate import reseal
from helpers.zoo import family
from knn_moe import KnnMoeError, RoutingMemory, attach
from knn_moe.errors import MemoryFormatError, MemoryMismatchError
from knn_moe.memory.files import read_config

IDS = torch.arange(3, 20)[None]
LAYER = "layer-001.safetensors"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Memories of each kind, to be copied and forged."""
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def forge(bases: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a memory, changes it, and makes its checksums true again."""

    def make(name: str, change: Callable[[Path], None]) -> Path:
        folder = shutil.copytree(bases[name], tmp_path / "memory")
        change(folder)
        reseal(folder)
        return folder

    return make


def edit(change: Callable[[Any], None]) -> Callable[[Path], None]:
    """Change the config."""

    def apply(folder: Path) -> None:
        path = folder / "memory_config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return apply


def put(**values: Any) -> Callable[[Path], None]:
    """Set fields of the config: a.b is written a__b, and a list's first entry a__0."""

    def change(config: Any) -> None:
        for name, value in values.items():
            *way, last = name.split("__")
            holder = config
            for step in way:
                holder = holder[int(step) if step.isdigit() else step]
            holder[last] = value

    return edit(change)


def swap(name: str, change: Callable[[Tensor], Any], file: str = LAYER) -> Callable[[Path], None]:
    """Change a tensor, in place or by what `change` returns."""

    def apply(folder: Path) -> None:
        tensors = {key: tensor.clone() for key, tensor in load_file(folder / file).items()}
        changed = change(tensors[name])
        tensors[name] = tensors[name] if changed is None else changed.contiguous()
        save_file(tensors, folder / file)

    return apply


def fill(place: int, number: float) -> Callable[[Tensor], None]:
    def change(tensor: Tensor) -> None:
        tensor.view(-1)[place] = number

    return change


CONFIGS = [
    ("plain", put(layers__0__gamma=0.0), "gamma must be a positive"),
    ("plain", put(layers__0__gamma=float("nan")), "not finite"),
    ("plain", put(layers__0__gamma=1e300), "gamma must be a positive"),
    ("plain", put(layers__0__gamma=True), "gamma must be a number"),
    ("plain", put(routing__k=10**30), "more than 64 bits"),
    ("plain", put(routing__k=1.5), "k must be a whole number"),
    ("plain", put(routing__gamma_scale="1"), "gamma_scale must be a number"),
    ("plain", put(routing__surprise=1), "unknown field 'surprise'"),
    ("plain", put(layers__0__layer=1), "twice"),
    ("plain", put(layers=[]), "no layer"),
    ("plain", put(keys=7), "the config says 7"),
    ("plain", put(tokens__file="../memory/tokens.safetensors"), "outside its folder"),
    ("plain", put(tokens__file="/etc/passwd"), "outside its folder"),
    ("plain", put(base_model__name="a\0b"), "a text that is not valid"),
    ("plain", put(libraries={"deep": "[" * 9}, pruned=[[[]]]), "pruned must be an object"),
    ("calibrated", put(calibration__change={}), "lacks 'difference'"),
    ("calibrated", put(head_keys__gamma=-1.0), "gamma must be"),
    ("fast", put(layers__0__shape=[32, 8, "nn"]), "shape that no layer has"),
    ("fast", put(layers__0__cases=10**9), "1,000,000,000 cases"),
    ("fast", put(layers__0__similarity="x"), "similarity"),
    ("fast", put(layers__0__index__bits=8), "codes as uint8"),
]


@pytest.mark.parametrize(("name", "change", "reason"), CONFIGS)
@pytest.mark.parametrize("verify", [True, False])
def test_a_config_that_cannot_be(
    forge: Callable[..., Path], name: str, change: Any, reason: str, verify: bool
) -> None:
    with pytest.raises(MemoryFormatError, match=reason):
        RoutingMemory.from_pretrained(forge(name, change), verify=verify)


TOKENS = "tokens.safetensors"
FORMS = [
    ("plain", swap("key", fill(3, 10**12), TOKENS), "in its key"),
    ("plain", swap("key", fill(3, -1), TOKENS), "in its key"),
    ("plain", swap("begin", fill(-1, 5), TOKENS), "begin|windows"),
    ("plain", swap("stream", fill(0, -5), TOKENS), "in its stream"),
    ("plain", swap("key", lambda tensor: tensor[:-1], TOKENS), "the config says"),
    ("plain", swap("stream", Tensor.long, TOKENS), "stream as int64"),
    ("plain", swap("keys", lambda tensor: tensor[:-1]), r"keys as float32 \["),
    ("plain", swap("values", Tensor.half), "values as float16"),
    ("plain", swap("values", lambda tensor: tensor[:, :0]), "without numbers"),
    ("fast", swap("index.rows", lambda tensor: tensor[:-1]), "rows as int32"),
    ("fast", swap("index.begin", Tensor.long), "begin as int64"),
    ("ivfpq", swap("index.residuals", lambda tensor: tensor[1:]), "residuals as float32"),
    ("calibrated", swap("keys", lambda tensor: tensor[1:], "head.safetensors"), "keys as float32"),
]


@pytest.mark.parametrize(("name", "change", "reason"), FORMS)
@pytest.mark.parametrize("verify", [True, False])
def test_lengths_that_disagree(
    forge: Callable[..., Path], name: str, change: Any, reason: str, verify: bool
) -> None:
    with pytest.raises(MemoryFormatError, match=reason):
        RoutingMemory.from_pretrained(forge(name, change), verify=verify)


NUMBERS = [
    *((kind, name, place, number)
      for kind, name in (("plain", "keys"), ("plain", "values"), ("calibrated", "keys"))
      for place, number in ((0, float("nan")), (-1, float("inf")), (7, 1e30))),
    ("router-head", "values", 5, float("-inf")),
    ("fast", "index.rows", 3, 2**31 - 1),
    ("fast", "index.rows", 3, -1),
    ("fast", "index.rows", 3, 0),
    ("fast", "index.begin", 1, 2**30),
    ("fast", "index.begin", 0, 1),
    ("fast", "index.norms", 0, -1),
    ("fast", "index.step", 0, 0.0),
    ("fast", "index.dropped", 2, float("nan")),
    ("fast", "index.projection", 2, float("inf")),
    ("fast", "values.steps", 2, float("inf")),
    ("fast-8-reranked", "index.keys", 2, float("nan")),
    ("ivfpq", "index.scale", 0, 0.0),
    ("ivfpq", "index.residuals", 0, -1.0),
    ("ivfpq", "index.correction", 0, float("nan")),
    ("ivfpq", "values.values", 0, float("nan")),
    ("faiss-flat", "index.centre", 0, float("nan")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tensor", "place", "number"), NUMBERS)
def test_numbers_are_checked_when_it_is_verified_and_when_it_is_attached(
    forge: Callable[..., Path], name: str, tensor: str, place: int, number: float
) -> None:
    folder = forge(name, swap(tensor, fill(place, number)))
    with pytest.raises(MemoryFormatError, match=tensor.split(".")[-1]):
        RoutingMemory.from_pretrained(folder)
    opened = RoutingMemory.from_pretrained(folder, verify=False)
    model = family("olmoe")
    with pytest.raises(MemoryFormatError, match=tensor.split(".")[-1]):
        attach(model, opened)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["ivfpq", "faiss-flat"])
@pytest.mark.parametrize(
    ("place", "data"),
    [
        (0, b"IxPT"),
        (4, b"\xff\xff\xff\x7f"),
        (8, b"\xff" * 8),
        (-8, b"\x7f" * 8),
        (37, b"\xff" * 8),
    ],
)
def test_a_faiss_index_is_read_before_faiss_reads_it(
    forge: Callable[..., Path], name: str, place: int, data: bytes
) -> None:
    def change(blob: Tensor) -> None:
        start = place % len(blob)
        blob[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    folder = forge(name, swap("index.faiss", change))
    with pytest.raises(MemoryFormatError, match="FAISS index"):
        RoutingMemory.from_pretrained(folder)
    with pytest.raises(MemoryFormatError, match="FAISS index"):
        attach(family("olmoe"), RoutingMemory.from_pretrained(folder, verify=False))


def test_lists_that_faiss_would_read_from_another_file(forge: Callable[..., Path]) -> None:
    def change(blob: Tensor) -> Tensor:
        data = bytes(blob.tolist())
        return torch.frombuffer(bytearray(data.replace(b"ilar", b"ilod")), dtype=torch.uint8)

    with pytest.raises(MemoryFormatError, match="its lists"):
        RoutingMemory.from_pretrained(forge("ivfpq", swap("index.faiss", change)))


def test_tokens_that_the_model_does_not_have(forge: Callable[..., Path]) -> None:
    folder = forge("router-head", swap("stream", fill(2, 500), TOKENS))
    opened = RoutingMemory.from_pretrained(folder)
    with pytest.raises(MemoryMismatchError, match="token 500"):
        attach(family("olmoe"), opened)
    with pytest.raises(MemoryMismatchError, match="token 500"):
        attach(family("olmoe"), opened, force=True)


def test_values_that_half_precision_cannot_hold(forge: Callable[..., Path]) -> None:
    opened = RoutingMemory.from_pretrained(forge("plain", swap("values", fill(2, 1e6))))
    with pytest.raises(MemoryMismatchError, match="float16 cannot hold"):
        attach(family("olmoe").half(), opened, force=True)
    attach(family("olmoe"), opened).detach()


def test_head_keys_of_another_width(forge: Callable[..., Path]) -> None:
    narrow = swap("keys", lambda tensor: tensor[:, :5], "head.safetensors")
    opened = RoutingMemory.from_pretrained(forge("calibrated", narrow))
    with pytest.raises(MemoryMismatchError, match="5 dimensions"):
        attach(family("olmoe"), opened)


def test_a_link_that_leaves_the_folder(forge: Callable[..., Path], tmp_path: Path) -> None:
    def link(folder: Path) -> None:
        (folder / LAYER).rename(tmp_path / "elsewhere")
        (folder / LAYER).symlink_to(tmp_path / "elsewhere")

    folder = forge("plain", link)
    with pytest.raises(MemoryFormatError, match="link to a file outside"):
        RoutingMemory.from_pretrained(folder)
    (folder / LAYER).unlink()
    (tmp_path / "elsewhere").rename(folder / "inside")
    (folder / LAYER).symlink_to("inside")
    RoutingMemory.from_pretrained(folder)


def test_the_hubs_cache_links_to_its_blobs(bases: dict[str, Path], tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(bases["plain"].iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    RoutingMemory.from_pretrained(snapshot)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 500 + "1" + "}" * 500, "[]", "", "\0", '{"a": 1e999}']
)
def test_a_config_that_is_no_plain_json(bases: dict[str, Path], tmp_path: Path, text: str) -> None:
    (tmp_path / "memory_config.json").write_text(text)
    with pytest.raises(MemoryFormatError, match=r"memory_config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["plain", "calibrated", "fast", "fast-8-reranked", "ivfpq"])
def test_what_was_not_forged_still_works(bases: dict[str, Path], name: str) -> None:
    model = family("olmoe")
    for verify in (True, False):
        with attach(model, RoutingMemory.from_pretrained(bases[name], verify=verify)):
            assert model(IDS, use_cache=False).logits.isfinite().all()


def test_the_error_is_public() -> None:
    with pytest.raises(KnnMoeError):
        RoutingMemory.from_pretrained(Path(__file__).parent)
