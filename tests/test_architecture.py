"""The shape of the code: which names are public, and which way imports point."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import knn_moe

ROOT = Path(knn_moe.__file__).parent

# Each room may import only from rooms above it.
ORDER = """
    errors similarity mixing next_token drawing provenance
    index.settings index.protocol index.exact index.others index.packing index.partition index.grid
    index.scan index.values index.fast index.faiss index.kernels index.parts index.launch
    index.fused index config gamma
    reference routers experts intercept dense embedded identity header card storage writer
    compressed memory optimise batches drain workspace build recall compression gate hooks
    head trace explanation explain reading handle memories stats likelihood generation usage
    controls harness
    labelling.agreement labelling.config labelling.prompts labelling.answers labelling.endpoint
    labelling.label labelling
    calibration.settings calibration.clock calibration.slices calibration.kernels calibration.fit
    calibration.values calibration.judge calibration.head calibration.result calibration.targets
    calibration.trials calibration.choose calibration.build calibration
    pruning.recalled pruning.by_loss pruning.by_values pruning
    tasks.task tasks.prompts tasks.parsing tasks.sandbox_child tasks.sandbox tasks.rows
    tasks.kinds tasks.catalogue tasks.package tasks.data tasks.registry tasks
    evaluation.sample evaluation.questions evaluation.answers evaluation.reference
    methods.method methods.setting methods.knn_moe methods.registry methods
    evaluation.runs evaluation.run evaluation.compare evaluation
    reproduce.table reproduce.paper reproduce.plan reproduce.study reproduce.results
    reproduce.sweeps reproduce.costs reproduce.write reproduce.run reproduce
    bench.models bench.build bench.keys bench.floor bench.search bench.steps bench.plot bench
    demo.result report demo cli.common cli
""".split()  # noqa: SIM905


def room(module: str) -> int:
    name = module.removeprefix("knn_moe").removeprefix(".")
    while name and name not in ORDER:
        name = name.rpartition(".")[0]
    return ORDER.index(name) if name else len(ORDER)


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("knn_moe"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if (ROOT / _file(name)).exists()} or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("knn_moe")}
    return {name for name in found if name}


def importers(library: str) -> list[str]:
    """The files of ours that import `library`, anywhere in them."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if any(name.split(".")[0] == library for name in names):
                found.append(path.relative_to(ROOT).as_posix())
                break
    return found


def _file(module: str) -> str:
    return module.removeprefix("knn_moe.").replace(".", "/") + ".py"


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts in (("__init__",), ("__main__",)):
            continue
        module = ".".join(("knn_moe", *(part for part in parts if part != "__init__")))
        allowed = room(module)
        assert allowed < len(ORDER), f"{module} has no place in ORDER"
        for name in imported(path) - {module}:
            same_package = room(name) == allowed and name.startswith(module.rpartition(".")[0])
            if room(name) >= allowed and not same_package:
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_a_library_that_may_be_missing_is_imported_in_one_place() -> None:
    assert importers("faiss") == ["index/faiss.py"]
    assert importers("trl") == importers("peft") == ["methods/tuning.py"]
    assert importers("sentence_transformers") == ["methods/embedding.py"]
    assert {Path(file).parent.as_posix() for file in importers("triton")} == {"index/kernels"}


def test_the_public_names_need_neither_faiss_nor_triton_nor_matplotlib() -> None:
    check = (
        "import sys; sys.modules |= dict.fromkeys(['faiss', 'triton', 'matplotlib'])\n"
        "import knn_moe\n"
        "[getattr(knn_moe, name) for name in knn_moe.__all__]"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_mathematics_imports_nothing_of_ours() -> None:
    assert imported(ROOT / "similarity.py") == set()
    assert imported(ROOT / "mixing.py") == set()
    assert imported(ROOT / "next_token.py") == set()


def test_public_names_are_those_meant() -> None:
    assert knn_moe.__all__ == [
        "BuildConfig",
        "Example",
        "HeadConfig",
        "IndexConfig",
        "LabelConfig",
        "RoutingConfig",
        "RoutingMemory",
        "attach",
        "attach_all",
        "build_calibrated",
        "build_memory",
        "calibrate",
        "compress",
        "control",
        "find_routers",
        "label",
        "load_examples",
        "prune",
    ]
    assert dir(knn_moe) == sorted([*knn_moe.__all__, "__version__"])
    assert all(getattr(knn_moe, name).__module__.startswith("knn_moe.") for name in knn_moe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'detach'"):
        _ = knn_moe.detach


def test_every_module_says_what_it_knows() -> None:
    for info in pkgutil.walk_packages([str(ROOT)], prefix="knn_moe."):
        assert importlib.import_module(info.name).__doc__, info.name
