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

# A package imports from those before it; between those of one group nothing is imported.
RULE = (
    "errors < support < config, pages < equations < routers, reference < index < memory < recall "
    "< build, explain < inference < adapt < tasks < labels, methods < evaluation "
    "< report < reproduce, demo, bench, chat, serve < harness, cli"
)
LEVEL = {name: level for level, group in enumerate(RULE.split(" < ")) for name in group.split(", ")}


def imports(path: Path) -> set[str]:
    """Every module that `path` imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf8"))))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return whole | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_imports_point_one_way() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        package = path.relative_to(ROOT).with_suffix("").parts[0]
        for module in imports(path):
            head, _, rest = module.partition(".")
            other = rest.split(".")[0]
            if head == "knn_moe" and package not in ("__init__", other):
                assert LEVEL[other] < LEVEL[package], f"{path.relative_to(ROOT)} imports {module}"


def importers(library: str) -> list[str]:
    """The files of ours that import `library`."""
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted(ROOT.rglob("*.py"))
        if library in {module.split(".")[0] for module in imports(path)}
    ]


@pytest.mark.slow
def test_a_library_that_may_be_missing_is_imported_in_one_place() -> None:
    assert importers("faiss") == ["index/faiss.py"]
    assert importers("fastapi") == ["serve/openai_api.py"]
    assert importers("uvicorn") == ["serve/server.py"]
    assert importers("prometheus_client") == ["serve/metrics.py"]
    assert importers("peft") == ["methods/lora.py"]
    assert importers("sentence_transformers") == ["methods/embedding.py"]
    kernels = {"index/fast/kernels", "recall/kernels"}
    assert {Path(file).parent.as_posix() for file in importers("triton")} == kernels


@pytest.mark.slow
def test_the_public_names_need_neither_faiss_nor_triton_nor_matplotlib() -> None:
    check = (
        "import sys; sys.modules |= dict.fromkeys(['faiss', 'triton', 'matplotlib'])\n"
        "import knn_moe\n"
        "[getattr(knn_moe, name) for name in knn_moe.__all__]"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_equations_import_nothing_of_ours() -> None:
    for path in (ROOT / "equations").glob("*.py"):
        assert not [module for module in imports(path) if module.startswith("knn_moe")], path


def test_public_names_are_those_meant() -> None:
    assert knn_moe.__all__ == [
        "BuildConfig",
        "Calibration",
        "CalibrationConfig",
        "DistilConfig",
        "Distillation",
        "EvalConfig",
        "Example",
        "Explanation",
        "HeadConfig",
        "IndexConfig",
        "KnnMoeError",
        "LabelConfig",
        "LayerRouting",
        "Memories",
        "Routing",
        "RoutingConfig",
        "RoutingMemory",
        "attach",
        "attach_all",
        "build_calibrated",
        "build_distilled",
        "build_memory",
        "calibrate",
        "compare_runs",
        "compress",
        "control",
        "detach",
        "distil",
        "evaluate",
        "find_routers",
        "label",
        "load_examples",
        "load_model",
        "prune",
    ]
    assert dir(knn_moe) == sorted([*knn_moe.__all__, "__version__"])
    assert all(getattr(knn_moe, name).__module__.startswith("knn_moe.") for name in knn_moe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'remember'"):
        _ = knn_moe.remember


def test_every_module_says_what_it_knows() -> None:
    for info in pkgutil.walk_packages([str(ROOT)], prefix="knn_moe."):
        assert importlib.import_module(info.name).__doc__, info.name
