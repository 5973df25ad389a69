"""The report in a browser: it fits, filters filter, search finds, tables sort, files are right."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers.browser import (
    SCHEMES,
    WIDTHS,
    assert_everything_fits,
    assert_labels_are_apart,
    look_at,
)
from helpers.html_page import assert_self_contained
from helpers.made_runs import make_run, write_runs
from helpers.real_runs import HOSTILE, METHODS, make_real_runs
from knn_moe.evaluation.store import Run, read_runs
from knn_moe.pages.page import write_page
from knn_moe.report.runs import render_runs
from knn_moe.report.samples import show_samples

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tiny_olmoe: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of real runs of three tasks by three methods."""
    return make_real_runs(tiny_olmoe, tiny_tokenizer, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all real runs."""
    path = tmp_path_factory.mktemp("pages") / "report.html"
    page = render_runs(read_runs(runs), "zero-shot", 200)
    assert_self_contained(page)
    write_page(page, path)
    return path


@pytest.fixture
def page(chromium: Browser, report: Path) -> Iterator[Page]:
    with look_at(chromium, report) as shown:
        yield shown


def samples_of(runs: Path, task: str) -> dict[str, Run]:
    return {run.method: run for run in read_runs(runs / task)}


def choose(page: Page, **values: str) -> None:
    """Set the viewer's controls by name, in this order."""
    for name, value in values.items():
        page.locator(f"#viewer select[name={name}]").select_option(label=value)


def shown_ids(page: Page) -> list[str]:
    """The ids on all pages of the viewer."""
    names = page.locator("#viewer .sample h3 > span:first-child").all_text_contents()
    following = page.locator("#viewer .next")
    while following.is_visible() and following.is_enabled():
        following.click()
        names += page.locator("#viewer .sample h3 > span:first-child").all_text_contents()
    return names


def status(page: Page) -> str:
    return page.locator("#viewer [role=status]").text_content() or ""


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_everything_fits(chromium: Browser, report: Path, width: int, scheme: str) -> None:
    with look_at(chromium, report, width, scheme) as page:
        assert page.title() == "kNN-MoE: tiny-olmoe on asked, code, quiz"
        for task in ("asked", "code", "quiz"):
            choose(page, task=task)
            assert_everything_fits(page)
            assert_labels_are_apart(page)
        for closed in page.locator("details").all():
            closed.locator("summary").click()
        assert_everything_fits(page)
        point = page.locator("#charts ~ .pair svg circle").first
        point.hover()
        assert "95 % interval" in page.locator("#charts ~ .pair").inner_text()


def test_axis_labels_say_their_sign_and_lie_inside(page: Page) -> None:
    labels = page.locator("[data-figure='1'] [aria-label='x-axis tick label'] text")
    texts = labels.all_text_contents()
    assert len(texts) >= 3
    assert all(text == "0" or text[0] in "+−" for text in texts)


def test_filters_keep_what_they_say(page: Page, runs: Path) -> None:
    by_method = samples_of(runs, "quiz")
    base, other = ({x.id: x for x in by_method[name].samples} for name in METHODS[::2])
    choose(page, task="quiz", method=METHODS[2])
    assert status(page) == "24 of 24 questions"
    expected = {
        "right": {name for name in other if other[name].score == 1},
        "wrong": {name for name in other if other[name].score == 0},
        "better than zero-shot": {name for name in other if other[name].score > base[name].score},
        "worse than zero-shot": {name for name in other if other[name].score < base[name].score},
        "another answer than zero-shot": {
            name for name in other if other[name].parsed != base[name].parsed
        },
    }
    assert sum(map(bool, expected.values())) >= 4
    for label, names in expected.items():
        option = page.locator("#viewer select[name=show] option").filter(has_text=f"{label} (")
        assert option.inner_text() == f"{label} ({len(names)})"
        assert option.is_enabled() == bool(names)
        if not names:
            continue
        choose(page, show=f"{label} ({len(names)})")
        assert set(shown_ids(page)) == names
        assert status(page) == f"{len(names)} of 24 questions"


def test_a_count_of_gained_questions_leads_to_them(page: Page, runs: Path) -> None:
    by_method = samples_of(runs, "quiz")
    base, other = ({x.id: x.score for x in by_method[name].samples} for name in METHODS[::2])
    gained = {name for name in other if other[name] > base[name]}
    row = (
        page.locator("#table-changes tbody tr").filter(has_text=METHODS[2]).filter(has_text="quiz")
    )
    row.get_by_role("button", name=f"{len(gained)}: show the questions of quiz").first.click()
    assert set(shown_ids(page)) == gained
    assert page.get_by_label("Answers of").input_value() == "2"


def test_search_finds_text_and_marks_it(page: Page) -> None:
    choose(page, task="quiz")
    search = page.get_by_label("Search")
    search.fill("ALERT(1)")
    page.wait_for_function("() => document.querySelectorAll('#viewer .sample').length === 1")
    assert shown_ids(page) == [HOSTILE["id"]]
    assert page.locator("#viewer mark").all_text_contents() == ["alert(1)"]
    search.fill("nowhere to be found")
    page.wait_for_function("() => !document.querySelector('#viewer .sample')")
    assert status(page) == "0 of 24 questions"


def test_a_question_shows_everything_as_text(page: Page, runs: Path) -> None:
    sample = next(one for one in samples_of(runs, "quiz")["knn"].samples if one.id == HOSTILE["id"])
    choose(page, task="quiz")
    card = page.locator("#viewer .sample").first
    said = card.inner_text()
    assert f"Question: {HOSTILE['question']}\nAnswer:" in said
    for choice, likelihood in zip(HOSTILE["choices"], sample.likelihoods or (), strict=True):
        assert choice in said
        assert f"{likelihood:.2f}".replace("-", "−") in said
    assert card.locator("tr.true th").inner_text() == f"A {HOSTILE['choices'][0]} ✓ right answer"
    chosen = card.locator("td.chosen")
    assert chosen.count() == 3
    assert card.locator("b, i, script").count() == 0


def test_outputs_are_side_by_side(page: Page, runs: Path) -> None:
    choose(page, task="asked")
    first = page.locator("#viewer .sample").first
    for method, run in samples_of(runs, "asked").items():
        sample = next(one for one in run.samples if one.id == HOSTILE["id"])
        output = first.get_by_role("group", name=f"Output of {method}", exact=True).text_content()
        assert output == ((sample.output or "").strip() or "(nothing)")
    page.get_by_label("zero-shot", exact=True).uncheck()
    assert first.locator(".side > div").count() == 2


def test_text_is_shown_with_its_losses(page: Page, runs: Path) -> None:
    choose(page, task="code", order="largest gain over zero-shot first")
    base, knn = ({x.id: x for x in samples_of(runs, "code")[name].samples} for name in METHODS[:2])
    gains = {name: (base[name].nll or 0) - (knn[name].nll or 0) for name in base}
    assert shown_ids(page) == sorted(gains, key=lambda name: -gains[name])
    assert "return first + second" in page.locator("#viewer .sample").first.inner_text()


def test_the_viewer_works_from_the_keyboard(page: Page) -> None:
    choose(page, task="quiz")
    names = page.evaluate(
        "() => [...document.querySelectorAll('#viewer select, #viewer input')]"
        ".filter((one) => !one.labels.length).map((one) => one.name)"
    )
    assert names == []
    before = page.locator("#viewer .sample h3").first.inner_text()
    page.locator("#viewer .next").focus()
    page.keyboard.press("Enter")
    assert page.locator("#viewer .pager span").inner_text() == "Page 2 of 3"
    assert page.locator("#viewer .sample h3").first.inner_text() != before


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def column(page: Page, table: int, place: int) -> list[str]:
    rows = page.locator("table.sortable").nth(table).locator("tbody tr")
    return [row.locator("td, th").nth(place).inner_text().split("\n")[0] for row in rows.all()]


def test_tables_sort_by_their_headers(page: Page) -> None:
    table = page.locator("table.sortable").first
    items = table.locator("thead th").nth(2)
    original = column(page, 0, 2)
    assert items.get_attribute("aria-sort") is None
    items.get_by_role("button").click()
    assert items.get_attribute("aria-sort") == "ascending"
    # As texts they would be 24, 29, 4, 5.
    assert column(page, 0, 2) == sorted(original, key=int) != sorted(original)
    items.get_by_role("button").press("Enter")
    assert items.get_attribute("aria-sort") == "descending"
    assert column(page, 0, 2) == sorted(original, key=int, reverse=True)
    items.get_by_role("button").click()
    assert items.get_attribute("aria-sort") is None
    assert column(page, 0, 2) == original
    change = table.locator("thead th").filter(has_text="Change of score")
    change.get_by_role("button").click()
    place = table.locator("thead th").all_inner_texts().index(change.inner_text())
    shown = [text.split()[0].replace("−", "-") for text in column(page, 0, place) if text != "–"]
    assert [float(text) for text in shown] == sorted(float(text) for text in shown)
    assert column(page, 0, place)[-1] == "–"  # what is not known comes last


def test_csv_files_hold_what_the_tables_show(page: Page, tmp_path: Path) -> None:
    for closed in page.locator("details summary").all():
        closed.click()
    links = page.get_by_role("link", name="Download as CSV").all()
    tables = page.locator("table.sortable").all()
    assert len(links) == len(tables) == 5
    for link, table in zip(links, tables, strict=True):
        with page.expect_download() as download:
            link.click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        rows = read_csv(path)
        shown = table.locator("tbody tr")
        assert shown.count() == len(rows)
        for row, line in zip(rows, shown.all(), strict=True):
            said = line.inner_text().replace("−", "-")
            assert row["method"] in said
            if "score" in row:
                assert f"{100 * float(row['score']):.1f}" in said
            if row.get("change"):
                assert f"{100 * float(row['change']):+.1f}".replace("+0.0", "0.0") in said


def test_the_questions_found_are_saved(page: Page, runs: Path, tmp_path: Path) -> None:
    choose(page, task="quiz")
    page.get_by_label("Search").fill("alert(1)")
    page.wait_for_function("() => document.querySelectorAll('#viewer .sample').length === 1")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download these as CSV").click()
    download.value.save_as(tmp_path / "found.csv")
    (row,) = read_csv(tmp_path / "found.csv")
    (sample,) = (x for x in samples_of(runs, "quiz")["knn"].samples if x.id == HOSTILE["id"])
    assert row["id"] == HOSTILE["id"]
    assert row["prompt"] == f"Question: {HOSTILE['question']}\nAnswer:"
    assert row["choices"] == " | ".join(HOSTILE["choices"])
    assert (float(row["knn score"]), row["knn parsed"]) == (sample.score, sample.parsed)
    found = [float(one) for one in row["knn likelihoods"].split(" | ")]
    assert found == pytest.approx(sample.likelihoods, abs=1e-3)


def test_the_numbers_need_no_script(chromium: Browser, report: Path) -> None:
    with look_at(chromium, report, script=False) as page:
        assert page.locator("table.sortable tbody tr").count() > 20
        assert page.locator("#viewer form").is_hidden()
        said = page.locator("main").inner_text()
        assert "The charts need JavaScript. Their numbers are in the tables." in said
        with page.expect_download() as download:
            page.get_by_role("link", name="Download as CSV").first.click()
        assert download.value.suggested_filename == "results.csv"


def many_runs(folder: Path, count: int) -> list[Run]:
    """Runs of so many questions, of which the last three are lost by knn."""
    base = make_run("zero-shot", [1.0] * count)
    knn = make_run("knn", [1.0] * (count - 3) + [0.0] * 3)
    write_runs(folder, [base, knn])
    return read_runs(folder)


def test_where_there_are_too_many_questions_those_that_changed_are_kept(tmp_path: Path) -> None:
    runs = many_runs(tmp_path, 400)
    (all_of_them,) = show_samples(runs, "zero-shot")
    assert len(all_of_them.data["questions"]) == 400
    (shown,) = show_samples(runs, "zero-shot", most_bytes=10_000)
    names = [row["id"] for row in shown.data["questions"]]
    assert 20 < len(names) < 200
    assert len(json.dumps(shown.data)) < 11_000
    assert names == sorted(names)
    assert names[-3:] == ["397", "398", "399"]
    assert f"{len(names)} of 400 are on this page, those that a method changed first" in shown.note
    assert "quiz/METHOD/samples.jsonl" in shown.note


def test_runs_without_prompts_and_secret_ones_are_shown_without(
    chromium: Browser, tmp_path: Path
) -> None:
    old = many_runs(tmp_path / "runs", 12)
    secret = [
        replace(run, facts={**run.facts, "secret": True, "task": "gpqa", "title": "GPQA"})
        for run in old
    ]
    for run in old:
        folder = tmp_path / "runs" / run.task / run.method
        with (folder / "asked.jsonl.gz").open("wb"):
            pass  # whatever lies there, nobody reads it for a secret task
    assert show_samples(secret, "zero-shot")[0].note.startswith("The authors of GPQA ask that")
    for run in old:
        (tmp_path / "runs" / run.task / run.method / "asked.jsonl.gz").unlink()
    write_page(render_runs([*old, *secret], "zero-shot", 50), tmp_path / "page.html")
    with look_at(chromium, tmp_path / "page.html") as page:
        assert (
            "keeps no prompts: an earlier version made it" in page.locator("#viewer").inner_text()
        )
        choose(page, task="gpqa")
        said = page.locator("#viewer").inner_text()
        assert "The authors of GPQA ask that its questions are not published." in said
        assert page.locator("#viewer .sample").count() == 10


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_losses_that_are_no_numbers_are_shown_in_words(
    chromium: Browser, tmp_path: Path, loss: float
) -> None:
    runs = many_runs(tmp_path / "runs", 4)
    broken = [
        Run({**run.facts, "scoring": "text"}, [replace(x, nll=loss) for x in run.samples])
        for run in runs
    ]
    (shown,) = show_samples(broken, "zero-shot")
    json.loads(json.dumps(shown.data), parse_constant=pytest.fail)
