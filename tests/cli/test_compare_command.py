"""`knn-moe compare`, in every form: chance levels, unparsed shares, and no false gain."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from helpers.commands import run_cli
from helpers.made_runs import generated_run, likely_run, make_run, write_runs

REASON = "zero-shot gave no answer in 60 of 60 outputs of phrase"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A false gain, a true one, a task without choices, and runs of an earlier version."""
    counts = [4] * 60
    return write_runs(
        tmp_path_factory.mktemp("runs"),
        [
            generated_run("zero-shot", 0, 60, task="phrase"),
            generated_run("knn", 30, 6, task="phrase"),
            likely_run("zero-shot", [1.0] * 30 + [0.0] * 30, counts, "real"),
            likely_run("knn", [1.0] * 50 + [0.0] * 10, counts, "real"),
            generated_run("zero-shot", 30, 0, task="sums", choices=None),
            generated_run("knn", 45, 3, task="sums", choices=None),
            make_run("zero-shot", [0.25] * 60, "words", scoring="text"),
            make_run("knn", [0.5] * 60, "words", scoring="text"),
        ],
    )


def rows_of(output: str) -> dict[tuple[str, str], list[str]]:
    """Return the cells of a printed table, by task and method."""
    lines = [line.strip("│").split("│") for line in output.splitlines() if line.startswith("│")]
    return {(line[0].strip(), line[1].strip()): [cell.strip() for cell in line] for line in lines}


def test_the_table(runs: Path) -> None:
    result = run_cli("compare", runs, "--resamples", 500)
    rows = rows_of(result.stdout)
    assert rows["phrase", "zero-shot"][5:7] == ["25.0", "100.0"]
    assert rows["phrase", "knn"][5:8] == ["25.0", "10.0", "+50.00"]
    assert rows["phrase", "knn"][9:11] == ["-", "-"]  # no p
    assert rows["real", "knn"][5:7] == ["25.0", "-"]
    assert float(rows["real", "knn"][9]) < 0.05
    assert rows["sums", "knn"][5:7] == ["-", "5.0"]
    assert rows["words", "knn"][5:7] == ["-", "-"]
    assert float(rows["words", "knn"][9]) < 0.05
    assert rows["Avg.", "knn"][9] == "-"
    said = " ".join(result.stdout.split())
    assert result.stderr == ""  # what a reader must know stays with the table
    assert f"phrase: the change of knn is not judged, because {REASON}." in said
    assert f"Avg.: the change of knn is not judged, because {REASON}." in said
    assert "real: the change" not in said


def test_json_and_csv_say_the_same(runs: Path) -> None:
    lines = json.loads(run_cli("compare", runs, "--resamples", 500, "--json").stdout)
    by_name = {(line["task"], line["method"]): line for line in lines}
    assert by_name["phrase", "zero-shot"]["chance"] == 0.25
    assert by_name["phrase", "zero-shot"]["unparsed_share"] == 1.0
    assert by_name["phrase", "knn"]["change"]["doubt"] == REASON
    assert "doubt" not in by_name["real", "knn"]["change"]
    assert by_name["real", "knn"]["unparsed"] is None
    assert by_name["sums", "knn"]["chance"] is None
    rows = list(csv.DictReader(io.StringIO(run_cli("compare", runs, "--csv").stdout)))
    found = {(row["task"], row["method"]): row for row in rows}
    assert found["phrase", "knn"]["change_doubt"] == REASON
    assert found["real", "knn"]["change_doubt"] == ""
    assert (found["sums", "knn"]["chance"], found["sums", "knn"]["unparsed"]) == ("", "3")


def test_csv_has_the_columns_even_if_nothing_is_known(tmp_path: Path) -> None:
    write_runs(tmp_path, [make_run("zero-shot", [0.0, 1.0])])
    (row,) = csv.DictReader(io.StringIO(run_cli("compare", tmp_path, "--csv").stdout))
    assert [row[name] for name in ("chance", "unparsed", "unparsed_share")] == ["", "", ""]


def test_latex_has_no_star_where_nothing_is_judged(runs: Path) -> None:
    latex = run_cli("compare", runs, "--resamples", 500, "--latex").stdout
    lines = {line.split(" & ")[0]: line for line in latex.splitlines() if " & " in line}
    assert lines["Chance"] == r"Chance & 25.00 & 25.00 & -- & -- & -- \\"
    _, phrase, real, sums, words, average = lines["knn"].split(" & ")
    assert phrase == r"50.00 (10.0\,\%)"
    assert real == "83.33$^{*}$"
    assert sums == r"75.00$^{*}$ (5.0\,\%)"
    assert words == "50.00$^{*}$"
    assert "*" not in average
    assert f"% phrase: the change of knn is not judged, because {REASON}." in latex


def test_the_page_of_a_report(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run_cli("report", runs, "-o", page).exit_code == 0
    text = " ".join(page.read_text(encoding="utf8").split())
    assert f"phrase: the change of knn is not judged, because {REASON}." in text
    assert '<td data-value="0.5" class="change not">' in text  # of phrase
    assert '<td data-value="0.3333333333333333" class="change better">' in text  # of real
