"""`knn-moe label`: a reference set of prompts that have no answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from knn_moe.cli.common import (
    device_option,
    dtype_option,
    json_option,
    load_model,
    print_json,
    progress_bar,
    usual_dtype,
)
from knn_moe.errors import ConfigError, LabelError

if TYPE_CHECKING:
    from knn_moe.labels.endpoint import EndpointJudge


@click.command(name="label")
@click.argument("model")
@click.argument("prompts", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="New .jsonl.")
@click.option("--by", help="confidence, agreement or judge. Default: confidence, or the --judge.")
@click.option("--keep", type=float, help="Share of the prompts to keep, the best. Default: 0.5.")
@click.option(
    "--threshold", type=float, help="Or the least score to keep. Default for the others: 0.5."
)
@click.option("--samples", type=int, help="Answers to each prompt, by agreement. Default: 8.")
@click.option("--temperature", type=float, help="They are drawn at, by agreement. Default: 0.7.")
@click.option("--max-new-tokens", default=64, show_default=True, help="Of an answer.")
@click.option("--stop", help="Text that an answer ends before, such as a question's first word.")
@click.option("--judge", "url", help="OpenAI-compatible endpoint; the key is OPENAI_API_KEY's.")
@click.option("--judge-model", help="The judge's name there.")
@click.option("--chat", is_flag=True, help="Put texts through the model's chat template.")
@click.option("--batch-size", default=16, show_default=True, help="Answers written at a time.")
@click.option("--seed", default=0, show_default=True, help="Of what is drawn.")
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it is there.")
@device_option
@dtype_option
@json_option
def command(
    model: str,
    prompts: Path,
    output: Path,
    url: str | None,
    judge_model: str | None,
    chat: bool,
    overwrite: bool,
    device: str | None,
    dtype: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """Answer PROMPTS with MODEL itself, and keep the answers that seem right.

    \b
    knn-moe label ./my-model prompts.jsonl -o reference.jsonl
    knn-moe label ./my-model prompts.txt -o reference.jsonl --by agreement --threshold 0.75
    knn-moe label ./my-model prompts.jsonl -o reference.jsonl \\
        --judge http://localhost:8000/v1 --judge-model NAME
    knn-moe build ./my-model reference.jsonl -o memory

    PROMPTS is .jsonl or .jsonl.gz with "prompt" or "messages" on each line, or .txt, a prompt a
    line. Plain texts need no labels: knn-moe build takes them as they are.
    """
    from knn_moe.labels.config import LabelConfig
    from knn_moe.labels.label import label, save_labelled, summary
    from knn_moe.labels.prompts import load_prompts

    given = {name: value for name, value in settings.items() if value is not None}
    config = LabelConfig(**({"by": "judge"} if url else {}) | given)
    judge = _judge(config.by, url, judge_model)
    _check_output(output, overwrite=overwrite)
    asked = load_prompts(prompts)  # a bad file is told before the model loads
    if chat:
        asked = [prompt.in_chat() for prompt in asked]
    network, tokenizer = load_model(model, device, usual_dtype(device, dtype))
    with progress_bar("Labelling") as update:
        labelled = label(network, tokenizer, asked, config, judge=judge, on_progress=update)
    save_labelled(output, labelled)
    facts = summary(labelled)
    if as_json:
        print_json({"output": str(output), "by": config.by, **facts})
    else:
        _show(output, config.by, facts)


def _judge(by: str, url: str | None, name: str | None) -> EndpointJudge | None:
    from knn_moe.labels.endpoint import EndpointJudge

    if (by == "judge") != (url is not None):
        raise ConfigError(f"--by judge and --judge URL go together, got --by {by}.")
    if (url is None) != (name is None):
        raise ConfigError("--judge URL and --judge-model NAME go together: give both.")
    return None if url is None or name is None else EndpointJudge(url, name)


def _check_output(output: Path, *, overwrite: bool) -> None:
    """Told before the work: its result would have nowhere to go, or nobody could read it."""
    if output.suffix != ".jsonl":
        raise ConfigError(
            f"-o must name a .jsonl file, which a build can read; got {output.name!r}."
        )
    if output.is_dir() or not output.parent.is_dir():
        raise LabelError(f"Cannot write {str(output)!r}: its folder is not there, or it is one.")
    if output.exists() and not overwrite:
        raise LabelError(f"{str(output)!r} exists already: pass --overwrite to replace it.")


def _show(output: Path, by: str, facts: dict[str, Any]) -> None:
    scores = facts["scores"]
    unscored = f", {facts['unscored']} without a score" if facts["unscored"] else ""
    click.echo(f"Kept {facts['kept']:,} of {facts['prompts']:,} prompts{unscored}, in {output}")
    click.echo(
        f"Scores by {by}: {scores['least']:.3f} to {scores['most']:.3f}, half of them from "
        f"{scores['lower_quarter']:.3f} to {scores['upper_quarter']:.3f}, median "
        f"{scores['median']:.3f}"
    )
