"""Build the demo's calibrated memory, without its evaluation: `make serve` serves it.

python scripts/demo_memory.py demo-memory
"""

from __future__ import annotations

import sys
from pathlib import Path

from knn_moe import BuildConfig, build_calibrated, load_model
from knn_moe.cli.common import show_progress
from knn_moe.demo.demo import CALIBRATION, DemoConfig
from knn_moe.demo.texts import load_documentation, sample_reference


def main(folder: Path) -> None:
    """Build the memory in `folder`."""
    config = DemoConfig()
    model, tokenizer = load_model("tiny-olmoe", dtype="float32")
    examples = sample_reference(load_documentation().reference, tokenizer, config.reference_tokens)
    build = BuildConfig(max_length=config.length, batch_tokens=2048)
    with show_progress("The demo's memory") as report:
        build_calibrated(
            model, tokenizer, examples, build, CALIBRATION, folder=folder, on_progress=report
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
