"""Stream a memory into a folder that appears under its name only when it is whole.

Rows come in any order and from any thread. Peak memory does not depend on how many there are:
each row goes to its place in a file of known size.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from knn_moe.memory import files
from knn_moe.memory.card import model_card
from knn_moe.memory.gamma import Gammas, estimate_by_domain, estimate_gamma
from knn_moe.memory.manifest import MemoryManifest
from knn_moe.reference.provenance import Provenance
from knn_moe.reference.windows import Span
from knn_moe.support.files import write_whole


class LayerShape(NamedTuple):
    hidden_size: int
    num_experts: int
    dtype: torch.dtype  # of the keys; values are fp32


class KnownGammas(NamedTuple):
    """γ of layers by number that need not be computed: of all cases; and of each domain."""

    joint: Mapping[int, float] = MappingProxyType({})
    domains: Mapping[int, tuple[float, ...]] = MappingProxyType({})


NOTHING_KNOWN: Final = KnownGammas()


class MemoryWriter:
    """One partial folder, from its first row to its publication."""

    def __init__(
        self,
        partial: Path,
        provenance: Provenance,
        layers: Mapping[int, LayerShape],
        *,
        fresh: bool = True,
    ) -> None:
        self.partial = partial
        self.provenance = provenance
        if fresh:
            files.write_tensors(partial / files.TOKENS_FILE, provenance.tensors())
        self.files = {
            index: files.StreamedFile(
                partial / files.layer_file(index),
                {
                    "keys": files.TensorPlan(shape.dtype, (len(provenance), shape.hidden_size)),
                    "values": files.TensorPlan(torch.float32, (len(provenance), shape.num_experts)),
                },
                fresh=fresh,
            )
            for index, shape in layers.items()
        }

    def write(self, layer: int, name: str, rows: Tensor, spans: Iterable[Span]) -> None:
        """Runs of a layer's "keys" or "values". Shapes: rows [n, d or N], on the CPU."""
        self.files[layer].write(name, rows, spans)

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.files = {}

    def finish(
        self,
        manifest: MemoryManifest,
        folder: Path,
        *,
        known: KnownGammas = NOTHING_KNOWN,
        device: torch.device | None = None,
        overwrite: bool = False,
    ) -> None:
        """Seal what was written and rename it to `folder`. γ that is not `known` is computed."""
        layers = list(self.files)
        self.close()
        with ThreadPoolExecutor() as pool:
            described = pool.map(
                lambda index: files.describe_file(self.partial / files.layer_file(index)),
                layers,
            )
            found = self._gammas(layers, known, device)
            entries = [
                {"layer": index, **gamma_entry(*found[index]), **entry}
                for index, entry in zip(layers, described, strict=True)
            ]
        seal(self.partial, manifest, self.provenance, entries, folder, overwrite=overwrite)

    def _gammas(
        self, layers: list[int], known: KnownGammas, device: torch.device | None
    ) -> dict[int, Gammas]:
        sizes = self.provenance.cases_of_domain
        domains = known.domains if len(sizes) > 1 else dict.fromkeys(layers, ())
        if all(index in known.joint and index in domains for index in layers):
            return {index: Gammas(known.joint[index], domains[index]) for index in layers}
        example, case = self.provenance.example, self.provenance.prefix_hash()

        def gamma(index: int) -> Gammas:
            keys = files.read_tensors(self.partial / files.layer_file(index))["keys"]
            joint = known.joint.get(index) or estimate_gamma(keys, example, case, device)
            if index in domains:
                return Gammas(joint, domains[index])
            return Gammas(joint, estimate_by_domain(keys, example, case, sizes, device, joint))

        # On a CPU one layer at a time keeps every core busy; a GPU waits for its keys to arrive.
        workers = 8 if device is not None and device.type == "cuda" else 1
        with ThreadPoolExecutor(max_workers=workers) as pool:
            return dict(zip(layers, pool.map(gamma, layers), strict=True))


def gamma_entry(joint: float, domains: tuple[float, ...]) -> dict[str, Any]:
    """What memory_config.json says of a layer's γ."""
    return {"gamma": joint, "gammas": list(domains)} if domains else {"gamma": joint}


def seal(
    partial: Path,
    manifest: MemoryManifest,
    provenance: Provenance,
    layers: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    overwrite: bool,
) -> None:
    """Write config and card beside the files of `partial`, and rename it to `folder`."""
    config: dict[str, Any] = {
        **manifest.to_dict(),
        "keys": len(provenance),
        "examples": provenance.num_examples,
        **({"domains": provenance.cases_of_domain} if provenance.num_domains > 1 else {}),
        "bytes": sum(entry["bytes"] for entry in layers),
        "tokens": files.describe_file(partial / files.TOKENS_FILE),
        "layers": list(layers),
    }
    (partial / "README.md").write_text(model_card(config), encoding="utf8")
    files.write_config(partial, config)
    files.publish(partial, folder, overwrite=overwrite)


def reseal(folder: Path, manifest: MemoryManifest) -> None:
    """Write another manifest into a memory's folder; its files stay as they are."""
    config = {**files.read_config(folder), **manifest.to_dict()}
    write_whole(folder / "README.md", model_card(config))
    files.write_config(folder, config)


@contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder`, to be sealed; gone if anything fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def write_layers(
    folder: Path,
    manifest: MemoryManifest,
    provenance: Provenance,
    layers: Iterable[tuple[int, Mapping[str, Any], Mapping[str, Tensor]]],
    *,
    overwrite: bool,
) -> None:
    """A memory of layers that come whole, one at a time: number, config entry, tensors."""
    files.refuse_existing(folder, overwrite=overwrite)
    with scratch_beside(folder) as scratch:
        files.write_tensors(scratch / files.TOKENS_FILE, provenance.tensors())
        entries = []
        for index, entry, tensors in layers:
            path = scratch / files.layer_file(index)
            files.write_tensors(path, tensors)
            entries.append({"layer": index, **entry, **files.describe_file(path)})
        seal(scratch, manifest, provenance, entries, folder, overwrite=overwrite)
