"""The notebook in examples/ runs from its first cell to its last, in a folder of its own."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "adapt.ipynb"


def read() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(cell: nbformat.NotebookNode, kind: str) -> str:
    """What a cell showed: its text ("text/plain"), its HTML, or what it printed ("stdout")."""
    shown = [each["data"].get(kind, "") for each in cell["outputs"] if "data" in each]
    shown += [each["text"] for each in cell["outputs"] if each.get("name") == kind]
    return "".join(shown)


@pytest.mark.slow
def test_the_notebook_runs_and_the_memory_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = read()
    client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    cells = {cell["id"]: cell for cell in notebook["cells"] if cell["cell_type"] == "code"}
    whole = "".join(outputs(cell, "stdout") for cell in cells.values())
    pages = [outputs(cell, "text/html") for cell in cells.values()]
    assert "It helps: True" in whole
    assert "Routing(detached" in whole
    for shown in ("Routing memory for tiny-olmoe", "rerouted", "with memory", "knn-shuffled"):
        assert any(shown in page for page in pages), shown
    assert (tmp_path / "explanation.html").stat().st_size > 1000
    rows = re.findall(r"<tr>.*?</tr>", next(page for page in pages if "knn-shuffled" in page))
    (calibrated,) = [row for row in rows if "knn-calibrated" in row]
    change_of_the_loss = calibrated.split("<td")[-1]
    assert ">\N{MINUS SIGN}0." in change_of_the_loss


def test_the_notebook_has_no_outputs() -> None:
    notebook = read()
    nbformat.validate(notebook)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), cell["id"]
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}


def test_the_links_of_the_notebook_lead_to_files() -> None:
    words = "\n".join(cell["source"] for cell in read()["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#:\s]+)", words)
    assert links
    for link in links:
        assert (NOTEBOOK.parent / link).exists(), link
