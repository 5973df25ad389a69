"""`knn-moe demo`: see the method work, on any machine, in two minutes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
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
    progress_bar,
)

if TYPE_CHECKING:
    from knn_moe.demo.result import DemoResult, Passage, Score
    from knn_moe.demo.texts import DemoText
    from knn_moe.support.statistics import Comparison

_DEMO_FILES: Final = {"paper", "strong", "report.html", "result.json"}


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
    help="Text of your own to remember: .jsonl, .jsonl.gz, .txt or .md.",
)
@click.option("--test", type=click.Path(path_type=Path), help="Text of your own to be tried on.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="About how many reference tokens to read.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Folder for the memories, report.html and result.json; a demo's folder is replaced.",
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
    """Give a small MoE a memory of text it never saw, and measure what that is worth.

    \b
    knn-moe demo
    knn-moe demo --model tiny-gpt-oss --out gpt-oss-demo
    knn-moe demo --reference mine.jsonl --test held-out.jsonl

    The model has read novels, textbooks, law and code; the new text is Python's documentation,
    which is wherever Python is. Builds the paper's memory and a stronger one, and compares both
    with the model alone and with a control. Takes about two minutes on two cores.
    """
    from knn_moe.demo.demo import Demo, DemoConfig
    from knn_moe.report.page import write_report
    from knn_moe.support.embedded_models import EMBEDDED_MODELS

    text = _text(reference, test)
    _require_free(out)
    # Small models are quickest in fp32 on a CPU; a large one may fit only as it is stored.
    dtype = "float32" if model in EMBEDDED_MODELS else "auto"
    network, tokenizer = load_model(model, device, dtype)
    config = DemoConfig(reference_tokens=tokens)
    with _replaced(out) as folder:
        with progress_bar("Demo") as update:

            def show(share: float, stage: str) -> None:
                update(round(share * 1000), 1000, stage)

            result = Demo(network, tokenizer, text, config, show).run(folder)
        facts = json.dumps(asdict(result), indent=1, ensure_ascii=False)
        (folder / "result.json").write_text(facts, encoding="utf8")
        write_report(result, folder / "report.html")
    if as_json:
        print_json(asdict(result))
    else:
        _print(result, out)


def _text(reference: Path | None, test: Path | None) -> DemoText:
    from knn_moe.demo.texts import documentation, own_text

    if reference is None and test is None:
        return documentation()
    if reference is None or test is None:
        missing = "--reference" if reference is None else "--test"
        raise click.UsageError(f"{missing} is missing: your own text needs both files.")
    return own_text(reference, test)


def _require_free(out: Path) -> None:
    """Only an empty folder or what an earlier demo left is replaced."""
    from knn_moe.memory.files import CONFIG_FILE

    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise click.UsageError(f"{str(parent)!r} is no folder, so {str(out)!r} cannot be made.")
    found = {file.name for file in out.iterdir()} if out.is_dir() else set()
    ours = {"result.json"} <= found <= _DEMO_FILES and all(
        (out / name / CONFIG_FILE).is_file() for name in found & {"paper", "strong"}
    )
    if out.is_file() or (found and not ours):
        raise click.UsageError(f"{str(out)!r} holds something else than a demo: choose another.")


@contextmanager
def _replaced(out: Path) -> Iterator[Path]:
    """A new folder that takes the place of `out` when all has gone well."""
    target = out.resolve()  # through a link: it stays, and what it points to is replaced
    partial = target.with_name(f".{target.name}.new")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _print(result: DemoResult, out: Path) -> None:
    columns = ("", "perplexity", "nats/token", "next token", "choice of 4", "mean λ", "rerouted")
    click.echo(f"model   {result.model}")
    click.echo(f"memory  {result.reference_tokens:,} tokens of {result.reference}")
    click.echo(f"test    {result.test_tokens:,} tokens of {result.test}, {result.choices} choices")
    print_table(None, columns, [_row(score) for score in result.scores])
    click.echo("* p < 0.05 against zero-shot, paired bootstrap over windows and choices\n")
    console = Console(highlight=False)
    for passage in result.passages[:2]:
        console.print(_shown(passage))
    click.echo(f"Read them token by token: {out / 'report.html'}")
    click.echo(f"The memories: {out / 'paper'}, {out / 'strong'}")


def _row(score: Score) -> tuple[str, ...]:
    return (
        score.way,
        f"{score.perplexity:.2f}",
        f"{score.nll:.3f}{_change(score.nll_change, '.3f', 1)}",
        f"{score.accuracy:.1%}{_change(score.accuracy_change, '.1f', 100)}",
        f"{score.choice:.1%}{_change(score.choice_change, '.1f', 100)}",
        _mean(score.confidence, ".2f"),
        _mean(score.rerouted, ".0%"),
    )


def _change(change: Comparison | None, form: str, scale: float) -> str:
    if change is None:
        return ""
    star = "*" if change.significant else " "
    return f" ({change.difference * scale:+{form}}){star}"


def _mean(values: tuple[float, ...], form: str) -> str:
    return format(sum(values) / len(values), form) if values else "-"


def _shown(passage: Passage) -> Text:
    """The passage, the tokens that became twice as likely in bold, and those that gained most."""
    shown = Text(f"{passage.title}: {passage.gain:+.1f} nats in {len(passage.tokens)} tokens\n")
    shown.stylize("bold")
    for token in passage.tokens:
        likelier = (token.nll_before or 0.0) - (token.nll_after or 0.0) > math.log(2)
        shown.append(token.text, "bold green" if likelier else "not bold")
    shown.append("\n\n")
    for place in sorted(_most_gained(passage, 4)):
        before, token = passage.tokens[max(place - 6, 0) : place], passage.tokens[place]
        one, two = math.exp(-(token.nll_before or 0.0)), math.exp(-(token.nll_after or 0.0))
        shown.append(f"{one:7.1%} → {two:5.1%}   …", "not bold")
        shown.append(_one_line("".join(part.text for part in before)), "dim not bold")
        shown.append(f"[{_one_line(token.text)}]\n", "bold green")
    return shown


def _most_gained(passage: Passage, count: int) -> list[int]:
    """The places of the tokens whose probability rose most."""

    def rise(place: int) -> float:
        token = passage.tokens[place]
        return math.exp(-(token.nll_after or 0.0)) - math.exp(-(token.nll_before or 0.0))

    return sorted(range(len(passage.tokens)), key=rise, reverse=True)[:count]


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎")
