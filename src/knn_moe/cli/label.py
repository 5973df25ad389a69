"""`knn-moe label`: make a reference set from prompts that have no answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from knn_moe.cli.common import (
    PATH,
    chat_option,
    evaluation_dtype,
    json_option,
    load_model,
    model_options,
    pick_given,
    print_json,
    print_note,
    print_text,
    seed_option,
    show_progress,
)
from knn_moe.cli.reference import open_source, reference_options

if TYPE_CHECKING:
    from knn_moe.labels.verdicts import WrittenVerdicts

_CONFIG: Final = (
    "by", "keep", "threshold", "samples", "temperature", "max_new_tokens", "stop", "batch_size",
    "seed",
)  # fmt: skip


@click.command(name="label")
@click.argument("model")
@click.argument("prompts", type=PATH)
@click.option(
    "-o", "--output", type=PATH, required=True, help="Write the reference set to this .jsonl file."
)
@click.option(
    "--by",
    help="Score answers by confidence (the model's own), agreement (of several samples) or judge. "
    "Default: confidence, or judge with --judge.",
)
@click.option(
    "--keep",
    type=float,
    help="Keep this share of the prompts, those with the best scores. Default by confidence: 0.5.",
)
@click.option(
    "--threshold",
    type=float,
    help="Keep every answer with at least this score. Default by agreement and judge: 0.5.",
)
@click.option(
    "--samples", type=int, help="By agreement: sample this many answers to a prompt. Default: 8."
)
@click.option(
    "--temperature", type=float, help="By agreement: sample at this temperature. Default: 0.7."
)
@click.option(
    "--max-new-tokens",
    default=64,
    show_default=True,
    help="Generate at most this many tokens per answer.",
)
@click.option("--stop", help="End an answer before this text.")
@click.option(
    "--judge",
    "url",
    help="Ask the model at this OpenAI-compatible endpoint. The key is read from OPENAI_API_KEY.",
)
@click.option("--judge-model", help="Name of the model at the endpoint.")
@chat_option
@click.option(
    "--batch-size", default=16, show_default=True, help="Generate this many answers at a time."
)
@seed_option("sampling")
@click.option("--overwrite", is_flag=True, help="Replace the output file if it exists.")
@reference_options
@model_options
@json_option
def command(model: str, prompts: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Answer PROMPTS with MODEL itself, and keep the answers that are probably right.

    \b
    knn-moe label tiny-olmoe prompts.jsonl -o reference.jsonl
    knn-moe label tiny-olmoe prompts.txt -o reference.jsonl --by agreement --threshold 0.75
    knn-moe label tiny-olmoe prompts.jsonl -o reference.jsonl \\
        --judge http://localhost:8000/v1 --judge-model NAME
    knn-moe build tiny-olmoe reference.jsonl -o memory

    PROMPTS is all that knn-moe build reads, without the answers: rows with "prompt", "messages",
    "question" or "instruction", or text with one prompt per line. Plain texts need no labels: give
    them to knn-moe build.

    Verdicts of a judge are kept in OUTPUT.verdicts as they come. After an interruption, the same
    command asks only for those that are missing.
    """
    from knn_moe.labels.config import LabelConfig
    from knn_moe.labels.label import label, save_labelled, summarise
    from knn_moe.labels.prompts import read_prompts

    given = pick_given(options, *_CONFIG)
    config = LabelConfig(**({"by": "judge"} if options["url"] else {}) | given)
    judge = _open_judge(config.by, options["url"], options["judge_model"], output)
    for name in () if config.by == "agreement" else ("samples", "temperature"):
        if name in given:
            raise click.UsageError(f"--{name} is for --by agreement, got --by {config.by}.")
    _check_output(output, overwrite=options["overwrite"])
    source = open_source(prompts, options, noun="Prompt", default_split="\n")
    unanswered = read_prompts(source, options["columns"])  # before the model is loaded
    print_note(source.describe("prompt"))
    if options["chat"]:
        unanswered = [prompt.as_chat() for prompt in unanswered]
    device = options["device"]
    network, tokenizer = load_model(model, device, evaluation_dtype(device, options["dtype"]))
    with show_progress("Labelling") as report:
        labelled = label(network, tokenizer, unanswered, config, judge=judge, on_progress=report)
    save_labelled(output, labelled)
    if judge is not None:
        judge.remove()
    facts = summarise(labelled)
    if as_json:
        print_json({"output": str(output), "by": config.by, **facts})
    else:
        _show(output, config.by, facts)


def _open_judge(by: str, url: str | None, name: str | None, output: Path) -> WrittenVerdicts | None:
    """Return the judge at `url`; its verdicts are kept beside the output until that is written."""
    from knn_moe.labels.endpoint import EndpointJudge
    from knn_moe.labels.verdicts import WrittenVerdicts

    if (by == "judge") != (url is not None):
        raise click.UsageError(f"--by judge and --judge URL go together, got --by {by}.")
    if (url is None) != (name is None):
        raise click.UsageError("--judge URL and --judge-model NAME go together. Give both.")
    if url is None or name is None:
        return None
    judge = EndpointJudge(url, name)
    return WrittenVerdicts(judge, output.with_name(f"{output.name}.verdicts"), judge.identity)


def _check_output(output: Path, *, overwrite: bool) -> None:
    """Refuse, before the work, a file that could not be written or read again."""
    if output.suffix != ".jsonl":
        raise click.UsageError(
            f"-o must name a .jsonl file, which knn-moe build can read; got {output.name!r}."
        )
    if output.is_dir():
        raise click.UsageError(f"{str(output)!r} is a folder. Name a file with -o.")
    if not output.parent.is_dir():
        raise click.UsageError(f"There is no folder {str(output.parent)!r} to write to.")
    if output.exists() and not overwrite:
        raise click.UsageError(f"{str(output)!r} already exists. Use --overwrite to replace it.")


def _show(output: Path, by: str, facts: dict[str, Any]) -> None:
    scores = facts["scores"]
    unscored = f" (no score for {facts['unscored']})" if facts["unscored"] else ""
    print_text(f"Kept {facts['kept']:,} of {facts['prompts']:,} prompts{unscored} in {output}.")
    click.echo(
        f"Scores by {by}: {scores['least']:.3f} to {scores['most']:.3f}, median "
        f"{scores['median']:.3f}, the middle half from {scores['lower_quarter']:.3f} to "
        f"{scores['upper_quarter']:.3f}."
    )
