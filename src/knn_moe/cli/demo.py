"""`knn-moe demo`: see the method work on any machine, in a few minutes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.text import Text

from knn_moe.cli.common import (
    device_option,
    json_option,
    load_model,
    print_json,
    print_table,
    print_text,
    show_progress,
)
from knn_moe.support.folders import put_in_place, scratch_beside
from knn_moe.support.terminal import one_line, printable

if TYPE_CHECKING:
    from knn_moe.demo.demo import DemoResult
    from knn_moe.demo.texts import DemoText
    from knn_moe.evaluation.compare import Line
    from knn_moe.evaluation.store import Run
    from knn_moe.report.passages import Passage
    from knn_moe.support.statistics import Comparison

_RESULT: Final = "result.json"
_DEMO_FILES: Final = {"paper", "calibrated", "runs", "report.html", _RESULT}


@click.command(name="demo")
@click.option(
    "--model",
    default="tiny-olmoe",
    show_default=True,
    help="tiny-olmoe, tiny-qwen3, tiny-gpt-oss, a folder or a hub id.",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    help="Your own text to remember: a file or a folder, as knn-moe build reads it.",
)
@click.option("--test", type=click.Path(path_type=Path), help="Your own text to test on.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=12_000,
    show_default=True,
    help="About how many reference tokens to read.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Folder for the memories, the runs, report.html and result.json. An earlier demo there is "
    "replaced.",
)
@device_option
@json_option
def command(
    model: str,
    reference: Path | None,
    test: Path | None,
    tokens: int,
    out: Path,
    device: str | None,
    as_json: bool,
) -> None:
    """Adapt a small MoE model to text it has never seen, and measure the gain.

    \b
    knn-moe demo
    knn-moe demo --model tiny-gpt-oss --out gpt-oss-demo
    knn-moe demo --reference mine.jsonl --test held-out.jsonl

    The model was trained on novels, textbooks, law and code. The new text is Python's
    documentation, which comes with Python. The demo builds the paper's memory and a calibrated
    one, and compares both with the model alone and with a control, the calibrated memory with its
    values shuffled. It takes two to three minutes on two cores.
    """
    from knn_moe.demo.demo import DemoConfig, render_demo, run_demo
    from knn_moe.pages.page import write_page
    from knn_moe.support.embedded_models import EMBEDDED_MODELS

    text = _choose_text(reference, test)
    _refuse_other_folders(out)
    # Small models are fastest in fp32 on a CPU. A large one may fit only in the dtype it is stored.
    dtype = "float32" if model in EMBEDDED_MODELS else "auto"
    network, tokenizer = load_model(model, device, dtype)
    config = DemoConfig(reference_tokens=tokens)
    with _replace_folder(out) as folder:
        with show_progress("Demo") as report:
            result = run_demo(network, tokenizer, text, config, folder, report)
        facts = json.dumps(result.to_dict(), indent=1, ensure_ascii=False)
        (folder / _RESULT).write_text(facts, encoding="utf8")
        write_page(render_demo(result), folder / "report.html")
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result, out)


def _choose_text(reference: Path | None, test: Path | None) -> DemoText:
    from knn_moe.demo.texts import load_documentation, read_files

    if reference is None and test is None:
        return load_documentation()
    if reference is None or test is None:
        missing = "--reference" if reference is None else "--test"
        raise click.UsageError(f"{missing} is missing. Your own text needs both files.")
    return read_files(reference, test)


def _refuse_other_folders(out: Path) -> None:
    """Refuse to replace anything but an empty folder or what an earlier demo wrote."""
    from knn_moe.memory.files import CONFIG_FILE

    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise click.UsageError(f"Cannot create {str(out)!r}: {str(parent)!r} is not a folder.")
    found = {file.name for file in out.iterdir()} if out.is_dir() else set()
    ours = {_RESULT} <= found <= _DEMO_FILES and all(
        (out / name / CONFIG_FILE).is_file() for name in found & {"paper", "calibrated"}
    )
    if out.is_file() or (found and not ours):
        raise click.UsageError(
            f"{str(out)!r} holds something else than a demo. Choose another --out."
        )


@contextmanager
def _replace_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `out` unless there is an exception."""
    target = out.resolve()  # a link stays, and what it points to is replaced
    with scratch_beside(target) as scratch:
        yield scratch
        put_in_place(scratch, target)


def _print(result: DemoResult, out: Path) -> None:
    columns = ("", "perplexity", "nats/token", "next token", "mean λ", "rerouted")
    print_text(f"model   {result.model}")
    print_text(f"memory  {result.reference_tokens:,} tokens of {result.text.reference_name}")
    print_text(f"test    {result.test_tokens:,} tokens of {result.text.test_name}")
    rows = [_row(run, line) for run, line in zip(result.runs, result.lines, strict=True)]
    print_table(None, columns, rows)
    click.echo("* p < 0.05 against zero-shot, paired bootstrap over windows of the text")
    click.echo("knn-shuffled is a control: the calibrated memory with its values shuffled\n")
    Console(highlight=False).print(_show_passage(result.passages[0]))
    print_text(f"The whole report, token by token: {out / 'report.html'}")
    print_text(f"The memories: {out / 'paper'}, {out / 'calibrated'}")


def _row(run: Run, line: Line) -> tuple[str, ...]:
    from knn_moe.demo.demo import perplexity
    from knn_moe.report.runs import mean_routing

    routing = mean_routing(run)
    return (
        line.method,
        f"{perplexity(line):.2f}",
        f"{line.nll:.3f}{_change(line.nll_change, '.3f', 1)}",
        f"{line.score.mean:.1%}{_change(line.change, '.1f', 100)}",
        f"{routing['mean_confidence']:.2f}" if "mean_confidence" in routing else "-",
        f"{routing['rerouted']:.0%}" if "rerouted" in routing else "-",
    )


def _change(change: Comparison | None, form: str, scale: float) -> str:
    if change is None:
        return ""
    star = "*" if change.significant else " "
    return f" ({change.difference * scale:+{form}}){star}"


def _show_passage(passage: Passage) -> Text:
    """Return the passage with tokens that became twice as likely in bold, and the largest rises."""
    texts = [printable(token.text) for token in passage.tokens]
    shown = Text(
        f"{one_line(passage.title)}: {passage.gain:+.1f} nats in {len(texts)} tokens\n", "bold"
    )
    shown.append(texts[0], "not bold")
    for text, (before, after) in zip(texts[1:], passage.losses, strict=True):
        shown.append(text, "bold green" if before - after > math.log(2) else "not bold")
    shown.append("\n\n")
    chances = [(math.exp(-before), math.exp(-after)) for before, after in passage.losses]
    rises = sorted(range(len(chances)), key=lambda place: chances[place][0] - chances[place][1])
    for place in sorted(rises[:6]):
        before, after = chances[place]
        shown.append(f"{before:7.1%} → {after:5.1%}   …", "not bold")
        context = "".join(texts[max(place - 5, 0) : place + 1])
        shown.append(one_line(context), "dim not bold")
        shown.append(f"[{one_line(texts[place + 1])}]\n", "bold green")
    return shown
