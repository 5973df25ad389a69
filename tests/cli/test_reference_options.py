"""Commands that read a reference set take every form of it."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from helpers.commands import assert_refused, run_cli
from helpers.quiz import make_questions
from helpers.zoo import TEXTS
from knn_moe import RoutingMemory, load_examples
from knn_moe.cli.main import main


def write_forms(folder: Path) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """TEXTS in several forms, each with the options to read it."""
    folder.mkdir()
    contents = {
        "ref.json": (json.dumps([{"body": text} for text in TEXTS]), ("--column", "text=body")),
        "ref.csv": ("\r\n".join(["text", *TEXTS]), ()),
        "ref.txt": ("\ufeff" + "\r\n\r\n".join(TEXTS), ()),
        "lines.md": ("\n".join(TEXTS), ("--split", r"\n")),
        "ref.log": ("\n---\n".join(TEXTS), ("--split", "---", "--format", "txt")),
        "many/a.txt": ("\n\n".join(TEXTS[:5]), ()),
    }
    (folder / "many").mkdir()
    forms = {}
    for name, (content, options) in contents.items():
        (folder / name).write_text(content, encoding="utf8", newline="")
        forms[name] = (folder / name, options)
    rest = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[5:])
    (folder / "many" / "b.jsonl").write_text(rest, encoding="utf8")
    forms["many/a.txt"] = (folder / "many", ())
    return forms


def test_every_form_builds_the_same_memory(
    saved_model: Path, saved_memory: Path, tmp_path: Path
) -> None:
    stream = RoutingMemory.from_pretrained(saved_memory).provenance.stream
    for name, (path, options) in write_forms(tmp_path / "forms").items():
        target = tmp_path / "memory"
        built = run_cli("build", saved_model, path, "-o", target, *options, "--overwrite")
        assert built.exit_code == 0, (name, built.output)
        assert f"Read {len(TEXTS)} examples from " in built.stderr, name
        assert RoutingMemory.from_pretrained(target).provenance.stream.equal(stream), name


def test_standard_input_is_built_and_appended(
    saved_model: Path, saved_memory: Path, tmp_path: Path
) -> None:
    def run(*arguments: object, given: list[str]) -> Result:
        words = [str(argument) for argument in arguments]
        return CliRunner().invoke(main, words, input="\n\n".join(given))

    first = run("build", saved_model, "-", "-o", tmp_path / "m", given=TEXTS[:6])
    assert "Read 6 examples from standard input, text split at blank lines" in first.stderr
    options = ("--append", tmp_path / "m", "-o", tmp_path / "m", "--overwrite")
    second = run("build", saved_model, "-", *options, given=TEXTS[6:])
    assert second.exit_code == 0, second.output
    whole = RoutingMemory.from_pretrained(tmp_path / "m").provenance.stream
    assert whole.equal(RoutingMemory.from_pretrained(saved_memory).provenance.stream)


def test_prompts_to_label_in_a_table(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.csv", tmp_path / "ref.jsonl"
    prompts.write_text("body,id\nThe import statement,1\nA class is,2\n", encoding="utf8")
    label = ("label", "tiny-olmoe", prompts, "-o", output, "--max-new-tokens", 4, "--keep", 1)
    assert_refused(run_cli(*label), "has 'body' (str), 'id' (str). Say which column")
    assert_refused(run_cli(*label, "--column", "text=body"), "There is no field 'text'")
    result = run_cli(*label, "--column", "prompt=body")
    assert result.exit_code == 0, result.output
    assert "Read 2 prompts from " in result.stderr
    assert [each.prompt for each in load_examples(output)] == ["The import statement", "A class is"]


def test_a_spreadsheet_of_questions_is_evaluated_as_their_rows_are(tmp_path: Path) -> None:
    questions = [row | {"choices": row["choices"][:2]} for row in make_questions(6)]
    questions = [row | {"answer": row["answer"] % 2} for row in questions]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, questions)), encoding="utf8")
    lines = [[row["question"], *row["choices"], "AB"[row["answer"]]] for row in questions]
    table = "\n".join("\t".join(line) for line in [["question", "A", "B", "answer"], *lines])
    (tmp_path / "table.tsv").write_text(table, encoding="utf8")
    chosen = ("-t", tmp_path / "rows.jsonl", "-t", tmp_path / "table.tsv", "-m", "zero-shot")
    result = run_cli("eval", "tiny-olmoe", *chosen, "-o", tmp_path / "runs", "--json")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert first["score"] == second["score"]
    for name, second_row in (("rows", questions[1]["id"]), ("table", "1")):
        samples = (tmp_path / "runs" / name / "zero-shot" / "samples.jsonl").read_text("utf8")
        right = {each["id"]: each["answer"] for each in map(json.loads, samples.splitlines())}
        assert right[second_row] == "B", name
