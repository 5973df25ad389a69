"""Reference sets from files of every format, folders, standard input, tables and data sets."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from torch.utils.data import Subset

from knn_moe.errors import MissingDependencyError, ReferenceSetError
from knn_moe.reference.examples import Example
from knn_moe.reference.load import ReferenceSet, iter_examples, load_examples
from knn_moe.reference.source import Source

ROWS = [
    {"prompt": "3 4", "completion": ' "5",\n6'},
    {"prompt": "ß\t\u2028\u0085", "completion": "7" * 200_000},
]
EXAMPLES = [Example(**row) for row in ROWS]
TEXT = "3 4\n5\n\n \t\n  ß 6\n"


def as_lines(rows: Iterable[object]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_table(separator: str) -> str:
    cells = [list(ROWS[0]), *(list(row.values()) for row in ROWS)]
    quoted = [['"' + cell.replace('"', '""') + '"' for cell in row] for row in cells]
    return "\n".join(separator.join(row) for row in quoted) + "\n\n"


CONTENTS = {
    "jsonl": "\n" + as_lines(ROWS),
    "json": json.dumps(ROWS, indent=2),
    "csv": as_table(","),
    "tsv": as_table("\t"),
}


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_parquet(path: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", CONTENTS)
def test_rows_of_every_format(name: str, ending: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"ref.{name}{ending}", CONTENTS[name])
    assert load_examples(path) == EXAMPLES
    assert load_examples(str(path)) == EXAMPLES
    assert load_examples(path.rename(tmp_path / f"REF.{name.upper()}{ending}")) == EXAMPLES


def test_a_table_with_semicolons(tmp_path: Path) -> None:
    """Where a comma is part of a number, spreadsheets write semicolons."""
    path = write(tmp_path / "ref.csv", '\ufeffprompt;completion\n3,1;"4;"\n')
    assert load_examples(path) == [Example("3,1", "4;")]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "ref.parquet")
    assert load_examples(path) == EXAMPLES
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'knn-moe\[eval\]'"):
            load_examples(path)
    path.write_bytes(path.read_bytes().replace(b"3 4", b"\xff 4"))
    with pytest.raises(ReferenceSetError, match=r"Cannot read .*ref\.parquet'.*utf-8"):
        load_examples(path)


@pytest.mark.parametrize("name", ["ref.txt", "ref.md", "ref.txt.gz"])
def test_text_is_split(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, TEXT)
    texts = {
        None: ["3 4\n5", "  ß 6"],
        "paragraphs": ["3 4\n5", "  ß 6"],
        "none": [TEXT],
        "\n": ["3 4", "5", "  ß 6"],
        "4\n": ["3 ", "5\n\n \t\n  ß 6"],
    }
    for split, expected in texts.items():
        assert load_examples(path, split=split) == [Example("", text) for text in expected], split


@pytest.mark.parametrize("name", [*CONTENTS, "txt"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_marks_and_windows_line_ends(name: str, encoding: str, tmp_path: Path) -> None:
    content = {**CONTENTS, "txt": TEXT}[name].replace("\n", "\r\n")
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    path = write(tmp_path / f"ref.{name}", (mark + content).encode(encoding))
    found = load_examples(path)
    if name == "txt":
        assert found == [Example("", "3 4\n5"), Example("", "  ß 6")]
    else:
        inside = "\r\n" if name in ("csv", "tsv") else "\n"  # a cell is kept as it is
        assert found[0] == Example("3 4", f' "5",{inside}6')
        assert found[1] == EXAMPLES[1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('["3", {"text": "4"}]', ["3", "4"]),
        ('{"version": 1, "data": [{"text": "3"}]}', ["3"]),
        ('{"text": "3"}', ["3"]),
        ('{"text": "3"}\n{"text": "4"}\n', ["3", "4"]),
    ],
)
def test_a_json_file(content: str, expected: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "ref.json", content)
    assert load_examples(path) == [Example("", text) for text in expected]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of examples, one below the other, and files that hold none."""
    folder = tmp_path / "ref"
    write(folder / "b" / "more.jsonl.gz", as_lines([{"text": "3"}]))
    write(folder / "a.md", "1\n\n2")
    for name in ("picture.png", "empty.txt", ".git/config.json", ".hidden.txt"):
        write(folder / name, "" if name.startswith("empty") else "9")
    return folder


def test_a_folder(folder: Path) -> None:
    found = ReferenceSet(Source(folder))
    for _ in range(2):
        assert list(found) == [Example("", text) for text in "123"]
    said = found.source.describe()
    assert said.startswith(f"Read 3 examples from 2 files of {folder}, text split at blank lines")
    assert said.endswith("Skipped, as empty or of another ending: empty.txt, picture.png.")


def test_a_folder_without_examples(tmp_path: Path) -> None:
    with pytest.raises(ReferenceSetError, match=r"holds no examples\. Known endings: \.jsonl, "):
        load_examples(tmp_path)


Stdin = Callable[[bytes], None]


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Stdin:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


@pytest.mark.parametrize("name", ["jsonl", "json", "csv", "parquet"])
def test_standard_input(name: str, stdin: Stdin, tmp_path: Path) -> None:
    parquet = write_parquet(tmp_path / "ref.parquet").read_bytes()
    stdin(parquet if name == "parquet" else CONTENTS[name].encode())
    found = ReferenceSet(Source("-", format="csv" if name == "csv" else None))
    for _ in range(2):  # as a build reads it: once to check, and once to build
        assert list(found) == EXAMPLES
    assert found.source.describe() == "Read 2 examples from standard input."


def test_text_from_standard_input(stdin: Stdin) -> None:
    stdin(TEXT.encode("utf-16"))
    assert load_examples("-", split="none") == [Example("", TEXT)]
    stdin(b"")
    with pytest.raises(ReferenceSetError, match="'standard input' is empty"):
        load_examples("-")
    for text in (b"[A link](of Markdown)", b"[1] and [2]"):  # it begins as JSON does
        stdin(text)
        with pytest.raises(ReferenceSetError, match=r"not JSON .*If it is text, .*--format txt"):
            load_examples("-")
        stdin(text)
        assert load_examples("-", format="txt") == [Example("", text.decode())]


def test_a_pipe_is_read_as_standard_input_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        pool.submit(pipe.write_text, CONTENTS["jsonl"], encoding="utf8")
        found = ReferenceSet(Source(pipe))
        assert [list(found), list(found)] == [EXAMPLES, EXAMPLES]


TABLES: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "generator": iter,
    "pandas": pandas.DataFrame,
    "pyarrow": pyarrow.Table.from_pylist,
    "datasets": datasets.Dataset.from_list,
    "torch": lambda rows: Subset(rows, range(len(rows))),
    "iterable": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_in_memory(kind: str) -> None:
    assert load_examples(TABLES[kind](ROWS)) == EXAMPLES
    renamed = [{"q": row["prompt"], "completion": row["completion"]} for row in ROWS]
    assert load_examples(TABLES[kind](renamed), columns={"prompt": "q"}) == EXAMPLES
    with pytest.raises(ReferenceSetError, match=r"^Example 0: needs .*; has 'body' \(str\)"):
        load_examples(TABLES[kind]([{"body": "3"}]))


def test_polars() -> None:
    polars = pytest.importorskip("polars")
    assert load_examples(polars.DataFrame(ROWS)) == EXAMPLES
    assert load_examples(polars.DataFrame(ROWS).lazy()) == EXAMPLES
    assert load_examples(polars.Series(["3"])) == [Example("", "3")]


def test_cells_of_pandas(tmp_path: Path) -> None:
    """A missing cell is no value, a list is an array, and a number has a type of its own."""
    quiz = {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1}
    rows = [{"text": "3"}, {"question": None, "text": "4"}, quiz]
    path = tmp_path / "ref.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    for frame in (pandas.DataFrame(rows[:2]), pandas.DataFrame(rows[:2]).convert_dtypes()):
        assert load_examples(frame) == [Example("", "3"), Example("", "4")]
    asked = Example("Question: 2 + 2?\nAnswer:", " 4", distractors=(" 3",))
    frame = pandas.DataFrame([quiz])
    assert load_examples(frame) == [asked]
    frame.to_parquet(path)
    assert load_examples(pandas.read_parquet(path)) == [asked]
    choices = {"text": ["3", "4"], "label": ["A", "B"]}
    pandas.DataFrame([{**quiz, "choices": choices, "answer": "B"}]).to_parquet(path)
    assert load_examples(pandas.read_parquet(path)) == [asked]
    assert load_examples(pandas.Series(["3", "4"])) == [Example("", "3"), Example("", "4")]


def test_rows_of_several_forms() -> None:
    mixed = [{"text": "3"}, {"prompt": "5", "completion": "6"}, "7"]
    assert load_examples(mixed) == [Example("", "3"), Example("5", "6"), Example("", "7")]
    columns = dict.fromkeys(["text", "prompt", "completion"])
    whole = datasets.Dataset.from_list([columns | row for row in mixed[:2]])  # type: ignore[operator]
    assert load_examples(whole) == [Example("", "3"), Example("5", "6")]


def test_examples_come_one_at_a_time() -> None:
    endless = iter(lambda: "3 4", None)
    assert next(iter_examples(endless)) == Example("", "3 4")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "as a list, a DataFrame or a Dataset; got NoneType"),
        (b"3 4", "got bytes"),
        (17, "got int"),
        (Example("3", "4"), "got Example"),
        ({"train": [], "test": []}, "a mapping of 'train', 'test': choose one of them"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "mapping of 'train'"),
        ("A text.\nOf two lines.", "is a text, not the name of a file. Give a list of texts"),
        ("word " * 1000, "is a text"),
        ("word " * 60, "is a text"),
        ("~nobody-at-all/r.jsonl", "There is no file or folder '~nobody-at-all/r.jsonl'"),
        ("no file at all", "There is no file or folder 'no file at all'"),
        (range(3), "^Example 0: must be .*; got int"),
    ],
)
def test_what_holds_no_examples_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ReferenceSetError, match=message):
        load_examples(given)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.jsonl", b'{"text": "3"}\n\n{"text": "4"\n', r"r\.jsonl, line 3: not JSON \("),
        ("r.jsonl.gz", b'{"text": "3"}\n\n{"body": 4}\n', r"r\.jsonl\.gz, line 3: needs .*'body' "),
        ("r.jsonl", b'{"text": "3"}\n{"text": "\xff"}', r"line 2: cannot be decoded as utf-8 \("),
        ("r.txt", b"3\n" * 99_999 + b"\xe4h", r"r\.txt, line 100000: cannot be decoded as utf-8"),
        ("r.csv.gz", b"text\n3\n\xe4h", r"r\.csv\.gz, line 3: cannot be decoded as utf-8"),
        ("r.txt", "3\n\ud800".encode("utf-16", "surrogatepass"), "line 2: .* utf-16-le"),
        ("r.json", b'[\n{"text": "3"},\n{"text" "4"}]', r"r\.json, line 3: not JSON"),
        ("r.json", b"[\n17\n]", r"r\.json, item 1: must be .*; got int"),
        ("r.json", b"17", "must hold a list, not int"),
        ("r.json", b"[" * 100_000, r"r\.json: not JSON \(maximum recursion"),
        ("r.jsonl", b'"3"\n' + b"[" * 100_000, r"line 2: not JSON \(maximum recursion"),
        ("r.jsonl", b'{"text": "3 \\ud800"}', r"line 1: has half of a character, '\\ud800'"),
        ("r.csv", b"text,id\n3,1\n4\n", r"r\.csv, line 3: has 1 cells, and the first row has 2"),
        ("r.csv", b"text,id\n3,1\n4,5,6\n", "line 3: has 3 cells"),
        ("r.csv", b'text\n3\n"4\n5\n', "line 3: unexpected end of data"),
        ("r.csv", b'body\n"3\n4"\n', r"r\.csv, line 2: needs .*; has 'body'"),
        ("r.csv", b"text,text\n3,4\n", "must name the columns, each differently"),
        ("r.csv", b"first text\nsecond text\n", r"line 2: needs .*; has 'first text' \(str\)"),
        ("r.jsonl.gz", b"", "is empty: it has no rows"),
        ("r.csv", b"text\n", "is empty"),
        ("r.json", b" ", "is empty"),
        ("r.txt", b" \n\n", "is empty"),
        ("r.parquet", b"3 4", r"Cannot read '.*r\.parquet'"),
        ("r.pdf", b"3 4", r"Cannot tell what '.*r\.pdf' holds. Known endings: .*--format"),
        ("r.parquet.gz", b"3 4", "Cannot tell what"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named_with_the_place(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(ReferenceSetError, match=message):
        load_examples(path)


@pytest.mark.parametrize("change", [lambda data: data[:-20], lambda data: b"plain"])
def test_a_damaged_archive(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = write(tmp_path / "ref.jsonl.gz", CONTENTS["jsonl"])
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ReferenceSetError, match=r"Cannot read .*ref\.jsonl\.gz"):
        load_examples(path)


@pytest.mark.parametrize("name", [*CONTENTS, "txt", "parquet", "jsonl.gz"])
def test_damage_is_refused_with_a_named_error_or_does_not_matter(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"ref.{name}"
    if name == "parquet":
        write_parquet(path)
        whole = path.read_bytes().replace(b"7" * 9, b"")
    else:
        content = {**CONTENTS, "txt": TEXT}[name.removesuffix(".gz")].replace("7" * 9, "")
        whole = write(path, content).read_bytes()
    draw = random.Random(name)
    pieces = (b"\xff\xfe", b"\x00", b'"', b"{", b"[", b"null", b"\\ud800", b"\r\n", b",")
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            data[at : at + draw.randint(0, 5)] = draw.choice([*pieces, draw.randbytes(3), b""])
        path.write_bytes(data)
        with suppress(ReferenceSetError):
            assert all(isinstance(each, Example) for each in load_examples(path))


def test_what_has_no_effect_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "ref.jsonl", CONTENTS["jsonl"])
    with pytest.raises(ReferenceSetError, match="Only plain text is split"):
        load_examples(path, split="none")
    with pytest.raises(ReferenceSetError, match="split is empty"):
        load_examples(path, split="")
    with pytest.raises(ReferenceSetError, match=r"Unknown format 'xml'\. Known: jsonl, "):
        load_examples(path, format="xml")
    with pytest.raises(ReferenceSetError, match=r"is a folder\. Leave 'csv' out"):
        load_examples(tmp_path, format="csv")
    for name in ("split", "format"):
        with pytest.raises(ReferenceSetError, match="named files only"):
            load_examples(ROWS, **{name: "txt"})


def test_a_format_may_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "ref.log", CONTENTS["csv"])
    assert load_examples(path, format="csv") == EXAMPLES


def as_data_set(folder: Path) -> Path:
    """A folder in the form of a data set on the hub: two configurations, three splits."""
    card = (
        "---\nconfigs:\n- config_name: big\n  data_files:\n"
        "  - split: train\n    path: big/train.jsonl\n  - split: test\n    path: big/test.jsonl\n"
        "- config_name: small\n  data_files:\n"
        "  - split: validation\n    path: small.jsonl\n---\nA data set.\n"
    )
    write(folder / "README.md", card)
    write(folder / "big" / "train.jsonl", as_lines(ROWS))
    write(folder / "big" / "test.jsonl", as_lines(ROWS[:1]))
    write(folder / "small.jsonl", as_lines([{"text": "3"}]))
    return folder


def test_a_data_set_in_the_form_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    folder = as_data_set(tmp_path / "org" / "name")
    for name in (f"{folder}:big:train", "org/name:big:train"):
        found = ReferenceSet(Source(name))
        assert list(found) == EXAMPLES
        assert found.source.describe() == f"Read 2 examples from {name}."
    assert load_examples("org/name:big:test") == EXAMPLES[:1]
    assert load_examples("org/name:big:train[:1]") == EXAMPLES[:1]
    assert load_examples("org/name:small:validation") == [Example("", "3")]
    with pytest.raises(ReferenceSetError, match="cannot be loaded as a data set of the hub"):
        load_examples("org/name:big:dev")
    for name in ("split", "format"):
        with pytest.raises(ReferenceSetError, match="is a data set, which has rows: leave split"):
            load_examples("org/name:big:train", **{name: "txt"})


def test_a_data_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ReferenceSetError, match="There is no file 'org/none', and it cannot be"):
        load_examples("org/none")
    with pytest.raises(ReferenceSetError, match=r"There is no file or folder 'org/none\.jsonl'"):
        load_examples("org/none.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'knn-moe\[eval\]'"):
        load_examples("org/none")
