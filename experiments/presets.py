"""Which settings a preset should have: a grid on text no model has seen.

    python models/presets.py tiny-olmoe tiny-qwen3 tiny-gpt-oss --out docs/measurements/presets

Memories of 800 × 256 tokens of medical and sql text, tried on another slice of the same training
split: the validation split that `measure.py` reports on takes no part in the choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from corpus import encode, read_texts, sample_texts, windows
from knn_moe import BuildConfig, RoutingConfig, attach, build_memory
from knn_moe.tasks.likelihood import token_losses
from measure import DOMAINS, LENGTH, Bench, common_parser

BUILDS = (  # steps, learning rate, gradient
    (1, 0.02, "sparse"),
    (5, 5.0, "sparse"),
    (10, 2.0, "sparse"),
    (10, 5.0, "sparse"),
    (5, 2.0, "dense"),
    (5, 5.0, "dense"),
    (5, 10.0, "dense"),
    (10, 2.0, "dense"),
    (10, 5.0, "dense"),
)
ROUTINGS = (  # neighbours, scale of γ where they are weighed, and where λ is taken from them
    *((1, 1.0, 1.0), (1, 0.1, 0.1), (8, 0.3, 0.3), (8, 0.1, 0.1)),
    *((16, 1.0, 1.0), (16, 0.3, 0.3), (16, 0.1, 0.1), (16, 0.03, 0.03)),
    *((32, 0.1, 0.1), (32, 0.03, 0.03)),
    *((16, 1.0, 0.5), (16, 1.0, 0.3), (16, 1.0, 0.2), (16, 1.0, 0.1)),
    *((16, 1.5, 0.3), (16, 1.5, 0.2), (16, 3.0, 0.2)),
)


def main() -> None:
    parser = common_parser((__doc__ or "").splitlines()[0], windows=100)
    parser.add_argument("--only", type=parse_build, help="one way to build: STEPS,RATE,GRADIENT")
    options = parser.parse_args()
    builds = [options.only] if options.only else BUILDS
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        bench = Bench.load(name, options.data, options.device)
        rows = []
        for domain in DOMAINS:
            for row in grid(bench, domain, builds, options):
                rows.append({"model": Path(name).name, "domain": domain, **row})
                print(rows[-1], flush=True)
        text = json.dumps(rows, indent=1)
        (options.out / f"{Path(name).name}.json").write_text(f"{text}\n", encoding="utf8")


def parse_build(text: str) -> tuple[int, float, str]:
    steps, rate, gradient = text.split(",")
    return int(steps), float(rate), gradient


def grid(
    bench: Bench, domain: str, builds: Iterable[tuple[int, float, str]], options: Any
) -> Iterator[dict[str, Any]]:
    """One row for each way to build and each way to use what was built."""
    tokens = options.sequences * LENGTH
    texts = read_texts(bench.data, domain, "train")
    reference = sample_texts(bench.tokenizer, texts, tokens)
    held = sample_texts(bench.tokenizer, texts, options.windows * LENGTH, skip=tokens)
    test = windows(encode(bench.tokenizer, held), LENGTH).long()
    alone = float(bench.losses(test).nll.mean())
    for steps, rate, gradient in builds:
        settings = {"steps": steps, "learning_rate": rate, "gradient": gradient}
        config = BuildConfig(**settings, max_length=LENGTH, batch_tokens=bench.batch_tokens)  # type: ignore[arg-type]
        memory = build_memory(bench.model, bench.tokenizer, reference, config)
        for k, scale, trusting in ROUTINGS:
            routing = RoutingConfig(k=k, gamma_scale=scale, confidence_scale=trusting)
            with attach(bench.model, memory, routing):
                losses = token_losses(bench.model, test, max(bench.batch_tokens // LENGTH, 1))
            change = round(float(losses.nll.mean()) - alone, 4)
            widths = {"gamma_scale": scale, "confidence_scale": trusting}
            yield {**settings, "k": k, **widths, "nll_change": change}


if __name__ == "__main__":
    main()
