"""What the commands of `knn-moe bench` share: options, the dtype, and a line of progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from knn_moe.cli.common import log, plain

if TYPE_CHECKING:
    import torch

    from knn_moe.support.progress import OnProgress, Progress

_F = TypeVar("_F", bound=Callable[..., Any])

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Default: bfloat16 on a GPU, float32 on a CPU.",
)


def count_option(
    *names: str, least: int = 1, default: Any = None, **options: Any
) -> Callable[[_F], _F]:
    """Return an option for a whole number that shows its default, if it has one."""
    shown: dict[str, Any] = {} if default is None else {"default": default, "show_default": True}
    return click.option(*names, type=click.IntRange(min=least), **shown, **options)


@contextmanager
def show_stage() -> Iterator[OnProgress]:
    """Show the current stage on stderr."""
    with log.status("") as status:

        def show(progress: Progress) -> None:
            done = f"({progress.done:,} of {progress.total:,} done)"
            status.update(plain(f"{progress.stage} {done}"))

        yield show


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    import torch

    usual = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name or usual)
    return dtype
