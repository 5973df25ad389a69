"""Which settings should the strong preset have?

    python experiments/search_presets.py tiny-olmoe tiny-qwen3 --out docs/measurements/presets

Tries a grid: every way to build in BUILDS with every way to recall in RECALLS, on medical and SQL
text. Memories are judged on another part of the same training split; the validation split that
`measure_presets.py` reports has no part in the choice. Writes OUT/MODEL.json after every row, and
a stopped run continues with the rows it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from torch import Tensor

from common import (
    DOMAINS,
    Arguments,
    MeasurementFile,
    ModelUnderTest,
    device_name,
    measuring_parser,
)
from corpus import WINDOW, cut_windows, encode_documents, read_texts, sample_texts
from knn_moe import BuildConfig, RoutingConfig, build_memory


class BuildChoice(NamedTuple):
    """Number of steps (S), step size (η) and gradient of a build."""

    steps: int
    learning_rate: float
    gradient: str


class RecallChoice(NamedTuple):
    """Neighbours (K), and the factors of γ for their weights and for the confidence (λ)."""

    k: int
    gamma_scale: float
    confidence_scale: float


BUILDS: Final = (
    BuildChoice(1, 0.02, "sparse"),
    BuildChoice(5, 5.0, "sparse"),
    BuildChoice(10, 2.0, "sparse"),
    BuildChoice(10, 5.0, "sparse"),
    BuildChoice(5, 2.0, "dense"),
    BuildChoice(5, 5.0, "dense"),
    BuildChoice(5, 10.0, "dense"),
    BuildChoice(10, 2.0, "dense"),
    BuildChoice(10, 5.0, "dense"),
)
RECALLS: Final = (
    *(RecallChoice(1, scale, scale) for scale in (1.0, 0.1)),
    *(RecallChoice(8, scale, scale) for scale in (0.3, 0.1)),
    *(RecallChoice(16, scale, scale) for scale in (1.0, 0.3, 0.1, 0.03)),
    *(RecallChoice(32, scale, scale) for scale in (0.1, 0.03)),
    *(RecallChoice(16, 1.0, scale) for scale in (0.5, 0.3, 0.2, 0.1)),
    *(RecallChoice(16, 1.5, scale) for scale in (0.3, 0.2)),
    RecallChoice(16, 3.0, 0.2),
)


def main(arguments: Arguments = None) -> None:
    """Search the grid for every model."""
    parser = measuring_parser(__doc__, sequences=800, windows=100)
    parser.add_argument(
        "--only",
        type=parse_build,
        help="try one way to build only: STEPS,LEARNING_RATE,GRADIENT, for example 5,2,dense",
    )
    options = parser.parse_args(arguments)
    builds = [options.only] if options.only else BUILDS
    for name in options.models:
        subject = ModelUnderTest.load(name, options.data, options.device)
        facts = {
            "model": subject.name,
            "sequences": options.sequences,
            "windows": options.windows,
            "device": device_name(options.device),
        }
        file = MeasurementFile(options.out / f"{subject.name}.json", facts)
        for domain in DOMAINS:
            search(subject, domain, builds, file)


def parse_build(text: str) -> BuildChoice:
    """Parse STEPS,LEARNING_RATE,GRADIENT."""
    steps, learning_rate, gradient = text.split(",")
    return BuildChoice(int(steps), float(learning_rate), gradient)


def search(
    subject: ModelUnderTest, domain: str, builds: Iterable[BuildChoice], file: MeasurementFile
) -> None:
    """Add one row for each way to build and each way to recall, unless the file has it."""
    reference, test = split_text(subject, domain, file.facts["sequences"], file.facts["windows"])
    base = float(subject.losses(test).nll.mean())
    for build in builds:
        missing = [
            recall
            for recall in RECALLS
            if not file.has(domain=domain, **build._asdict(), **recall._asdict())
        ]
        if not missing:
            continue
        config = BuildConfig(
            **build._asdict(), max_length=WINDOW, batch_tokens=subject.batch_tokens
        )
        memory = build_memory(subject.model, subject.tokenizer, reference, config)
        for recall in missing:
            losses = subject.losses(test, memory, RoutingConfig(**recall._asdict()))
            choice: dict[str, Any] = {"domain": domain, **build._asdict(), **recall._asdict()}
            file.add({**choice, "nll_change": round(float(losses.nll.mean()) - base, 4)})


def split_text(
    subject: ModelUnderTest, domain: str, sequences: int, windows: int
) -> tuple[list[str], Tensor]:
    """Return reference texts and test windows from different parts of the training split.

    Shape of the windows: [windows, WINDOW].
    """
    texts = read_texts(subject.data, domain, "train")
    reference = sample_texts(subject.tokenizer, texts, sequences * WINDOW)
    held = sample_texts(subject.tokenizer, texts, windows * WINDOW, skip=sequences * WINDOW)
    return reference, cut_windows(encode_documents(subject.tokenizer, held), WINDOW).long()


if __name__ == "__main__":
    main()
