"""Share what the measuring scripts need: arguments, a loaded model, comparisons, files of rows.

Not a script of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from corpus import WINDOW, find_data_folder, load_validation_windows, read_texts, sample_texts
from knn_moe import (
    BuildConfig,
    RoutingConfig,
    RoutingMemory,
    attach,
    build_calibrated,
    build_memory,
)
from knn_moe.reference.examples import ExampleLike
from knn_moe.support.embedded_models import embedded_model
from knn_moe.support.statistics import paired_bootstrap
from knn_moe.tasks.likelihood import TokenLosses, token_losses

NEAR: Final = "medical"  # the unseen domain nearest to what the models have read
DOMAINS: Final = (NEAR, "sql")
# A way to build for scripts that need a large effect of values that were not trained. Its numbers
# were chosen on the embedded models; other models may need other ones (docs/research.md).
LARGE: Final = "large-steps"
LARGE_ROUTING: Final = RoutingConfig(k=16, gamma_scale=1.5, confidence_scale=0.2)

Row = dict[str, Any]
Arguments = Sequence[str] | None  # of main(); None: those of the command line


@dataclass(frozen=True)
class ModelUnderTest:
    """A model on its device, its tokenizer, and the folder of data it is measured on."""

    name: str
    model: Any
    tokenizer: Any
    data: Path
    batch_tokens: int

    @staticmethod
    def load(name: str, data: Path, device: str) -> ModelUnderTest:
        """Load an embedded model or a folder: in bf16 on a GPU, in fp32 elsewhere."""
        place = embedded_model(name)
        on_gpu = device.startswith("cuda")
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
        return ModelUnderTest(
            name=Path(name).name,
            model=model.to(device).eval(),
            tokenizer=AutoTokenizer.from_pretrained(place),
            data=data,
            batch_tokens=32768 if on_gpu else 2048,
        )

    def build(self, domain: str, way: str, sequences: int) -> RoutingMemory:
        """Build a memory from `sequences` × WINDOW tokens of the domain's training text.

        Args:
            domain: Of the text.
            way: "paper", "calibrated" or LARGE.
            sequences: How much text.
        """
        texts = read_texts(self.data, domain, "train")
        reference = sample_texts(self.tokenizer, texts, sequences * WINDOW)
        sizes: dict[str, Any] = {"max_length": WINDOW, "batch_tokens": self.batch_tokens}
        if way == LARGE:
            return self.build_large(reference, **sizes)
        inputs = self.model, self.tokenizer, reference, BuildConfig(**sizes)
        return build_memory(*inputs) if way == "paper" else build_calibrated(*inputs)[0]

    def build_large(self, reference: Sequence[ExampleLike], **sizes: Any) -> RoutingMemory:
        """Build a memory with large steps, to be recalled with many neighbours."""
        config = BuildConfig(steps=5, learning_rate=2.0, gradient="dense", **sizes)
        memory = build_memory(self.model, self.tokenizer, reference, config)
        return replace(memory, manifest=replace(memory.manifest, routing=LARGE_ROUTING))

    def test_windows(self, domain: str, count: int) -> Tensor:
        """Load windows of the domain's validation text. Shape: [count, WINDOW]."""
        return load_validation_windows(self.tokenizer, self.data, (domain,))[domain][:count]

    def losses(
        self,
        windows: Tensor,
        memory: RoutingMemory | None = None,
        routing: RoutingConfig | None = None,
    ) -> TokenLosses:
        """Score the windows without a memory, or with one attached."""
        if memory is None:
            return self._score(windows)
        with attach(self.model, memory, routing):
            return self._score(windows)

    def _score(self, windows: Tensor) -> TokenLosses:
        return token_losses(self.model, windows, max(self.batch_tokens // WINDOW, 1))


def compare_losses(losses: TokenLosses, base: TokenLosses | None = None) -> Row:
    """Return mean loss and accuracy and, against `base`, their changes with 95 % intervals.

    The intervals are of a paired bootstrap over windows.
    """
    row: Row = {}
    for name in ("nll", "correct"):
        means = _window_means(losses, name)
        key = "accuracy" if name == "correct" else name
        row[key] = round(float(means.mean()), 4)
        if base is not None:
            change = asdict(paired_bootstrap(means, _window_means(base, name)))
            row[f"{key}_change"] = {part: round(value, 5) for part, value in change.items()}
    return row


def _window_means(losses: TokenLosses, name: str) -> Any:
    tensor: Tensor = getattr(losses, name)
    return tensor.float().mean(dim=1).numpy()


class MeasurementFile:
    """A JSON file of facts and rows, written after every row so that a stopped run can continue.

    Rows that the file already has are kept if none of its facts differs from the given ones. A file
    of an earlier version may have fewer facts, or be a plain list of rows.
    """

    def __init__(self, path: Path, facts: Row) -> None:
        self.path = path
        self.facts = facts
        known = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
        if isinstance(known, list):
            known = {"rows": known}
        same = all(known.get(name, value) == value for name, value in facts.items())
        self.rows: list[Row] = known.get("rows", []) if same else []

    def has(self, **fields: Any) -> bool:
        """Return whether a row has all these fields."""
        return any(fields.items() <= row.items() for row in self.rows)

    def add(self, row: Row) -> None:
        """Print the row, append it and write the file."""
        print(self.path.stem, row, flush=True)
        self.rows.append(row)
        write_json(self.path, {**self.facts, "rows": self.rows})


def write_json(path: Path, content: Any) -> None:
    """Write JSON, one indented line per value, and create the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf8")


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """Make a parser that shows the script's documentation as its help."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def measuring_parser(
    documentation: str | None, sequences: int, windows: int
) -> argparse.ArgumentParser:
    """Make the parser of a script that tries memories on models. The sizes are its defaults."""
    parser = make_parser(documentation)
    parser.add_argument("models", nargs="+", help="embedded model names or model folders")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    add_data_and_device(parser)
    parser.add_argument(
        "--sequences",
        type=int,
        default=sequences,
        help=f"reference text in sequences of {WINDOW} tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--windows",
        type=int,
        default=windows,
        help=f"test text in windows of {WINDOW} tokens (default: %(default)s)",
    )
    return parser


def add_data_and_device(parser: argparse.ArgumentParser) -> None:
    """Add --data and --device."""
    parser.add_argument(
        "--data",
        type=Path,
        default=find_data_folder(),
        help="folder of training and benchmark text (default: $KNN_MOE_DATA)",
    )
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="torch device (default: cuda if there is one)",
    )


def device_name(device: str) -> str:
    """Return the name that results give a device."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def save_plot(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as SVG, the same bytes for the same figure."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "knn-moe"}):
        figure.savefig(path, metadata={"Date": None})
