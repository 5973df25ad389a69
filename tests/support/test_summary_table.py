"""Small tables: escaped in a notebook, aligned in a terminal."""

from __future__ import annotations

from knn_moe.support.summary_table import SummaryTable

TABLE = SummaryTable(
    title="Scores of <b>",
    columns=("name", "score"),
    rows=[("<script>alert(1)</script>", "1.5"), ("a\x1b[31mb 語", "10.25")],
    notes=["Tom & Jerry"],
)


def test_a_notebook_shows_texts_as_they_are() -> None:
    html = TABLE.to_html()
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "Scores of &lt;b&gt;" in html
    assert "Tom &amp; Jerry" in html
    assert "\x1b" not in html
    assert html.count("<tr>") == 3
    assert html.count('scope="row"') == 2


def test_colours_are_those_around_the_table() -> None:
    """Light on dark, or dark on light: the table says nothing of its own."""
    html = TABLE.to_html()
    assert "#" not in html
    assert "rgb" not in html
    assert html.count("color: inherit") == 1 + 1 + 2 * 3


def test_columns_are_aligned_in_a_terminal() -> None:
    title, head, first, second, note = TABLE.to_text().splitlines()
    assert title == "Scores of <b>"
    assert head == "name                       score"
    assert first == "<script>alert(1)</script>    1.5"
    assert second == "a�[31mb 語                 10.25"
    assert note == "Tom & Jerry"


def test_a_table_may_have_no_headings_and_no_rows() -> None:
    bare = SummaryTable(title="Facts", rows=[("cases", "3"), ("model", "tiny")], texts=2)
    assert bare.to_text() == "Facts\ncases  3\nmodel  tiny"
    assert "<thead>" not in bare.to_html()
    assert SummaryTable(title="Nothing", rows=[]).to_text() == "Nothing"
    assert SummaryTable(title="None", columns=("a", "b"), rows=[]).to_text() == "None\na  b"


def test_columns_that_are_too_wide_are_stacked() -> None:
    wide = SummaryTable(
        title="Wide",
        columns=("task", "method", "n", "change of the score"),
        rows=[("quiz", "knn", "3", "+1.0 " * 15), ("quiz", "語", "4", "")],
        texts=2,
    )
    title, *lines = wide.to_text().splitlines()
    assert title == "Wide"
    assert lines[0] == "quiz, knn"
    assert lines[1].split() == ["n", "3"]
    assert lines[2].startswith("  change of the score  +1.0 +1.0")
    assert lines[3] == "quiz, 語"
