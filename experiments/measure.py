"""What a memory is worth to a trained model on text it never saw: the project's own table.

    python models/measure.py tiny-olmoe tiny-qwen3 OUT/olmoe-80m --out docs/measurements

For each model, on medical (near) and sql (far) text: the model alone, the paper's preset, the
strong one, and the strong memory with its values shuffled; then how the gain on medical text grows
with the reference set. Writes OUT/MODEL.json; `publish.py` makes tables and plots of those.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from audit import device_name, held_out
from corpus import default_data, read_texts, sample_texts
from knn_moe import BuildConfig, RoutingMemory, attach, build_memory
from knn_moe.adapt.controls import shuffle_values
from knn_moe.support.embedded_models import embedded_model
from knn_moe.support.statistics import paired_bootstrap
from knn_moe.tasks.likelihood import TokenLosses, token_losses

DOMAINS = ("medical", "sql")
LENGTH = 256  # tokens in a window
SIZES = (50, 100, 200, 400, 800, 1600, 3200)  # sequences of LENGTH tokens


@dataclass
class Bench:
    """A model on a device, and the data it is tried on."""

    model: Any
    tokenizer: Any
    data: Path
    batch_tokens: int

    @staticmethod
    def load(name: str, data: Path, device: str) -> Bench:
        place = embedded_model(name)
        on_gpu = device.startswith("cuda")
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(place)
        return Bench(model, tokenizer, data, 32768 if on_gpu else 2048)

    def build(self, domain: str, preset: str, sequences: int, **asked: Any) -> RoutingMemory:
        """Of so many sequences; `asked`: settings other than the preset's."""
        texts = read_texts(self.data, domain, "train")
        reference = sample_texts(self.tokenizer, texts, sequences * LENGTH)
        config = BuildConfig(
            preset=preset, max_length=LENGTH, batch_tokens=self.batch_tokens, **asked
        )
        return build_memory(self.model, self.tokenizer, reference, config)

    def test(self, domain: str, windows: int) -> Tensor:
        return held_out(self.tokenizer, self.data, (domain,))[domain][:windows]

    def losses(self, windows: Tensor, memory: RoutingMemory | None = None) -> TokenLosses:
        batch = max(self.batch_tokens // LENGTH, 1)
        if memory is None:
            return token_losses(self.model, windows, batch)
        with attach(self.model, memory):
            return token_losses(self.model, windows, batch)


def main() -> None:
    parser = common_parser((__doc__ or "").splitlines()[0], windows=200)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="for the growth")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        bench = Bench.load(name, options.data, options.device)
        found = {
            "model": Path(name).name,
            "sequences": options.sequences,
            "device": device_name(options.device),
            "table": table(bench, options.sequences, options.windows),
        }
        _write(options.out, found)
        found["growth"] = growth(bench, options.sizes, options.windows)
        _write(options.out, found)


def common_parser(description: str, windows: int) -> argparse.ArgumentParser:
    """What every script that tries memories on models asks for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("models", nargs="+", help="embedded names or folders")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sequences", type=int, default=800, help="reference sequences")
    parser.add_argument("--windows", type=int, default=windows, help="windows to try them on")
    return parser


def table(bench: Bench, sequences: int, windows: int) -> list[dict[str, Any]]:
    """One row for each domain and way."""
    rows = []
    for domain in DOMAINS:
        test = bench.test(domain, windows)
        alone = bench.losses(test)
        strong = bench.build(domain, "strong", sequences)
        ways = {
            "zero-shot": alone,
            "paper": bench.losses(test, bench.build(domain, "paper", sequences)),
            "strong": bench.losses(test, strong),
            "control": bench.losses(test, shuffle_values(strong)),
        }
        for way, found in ways.items():
            rows.append({"domain": domain, "way": way, **compare(found, alone)})
            print(bench.model.config.name_or_path, rows[-1], flush=True)
    return rows


def growth(bench: Bench, sizes: tuple[int, ...], windows: int) -> list[dict[str, Any]]:
    """One row for each size of the reference set and preset, on medical text."""
    test = bench.test("medical", windows)
    alone = bench.losses(test)
    rows = []
    for size in sizes:
        for preset in ("paper", "strong"):
            found = bench.losses(test, bench.build("medical", preset, size))
            rows.append({"sequences": size, "way": preset, **compare(found, alone)})
            print(bench.model.config.name_or_path, rows[-1], flush=True)
    return rows


def compare(found: TokenLosses, alone: TokenLosses) -> dict[str, Any]:
    """Means, and the changes against the model alone, resampled by window."""
    facts: dict[str, Any] = {}
    pairs = {"nll": (found.nll, alone.nll), "accuracy": (found.correct, alone.correct)}
    for name, (with_it, without) in pairs.items():
        one, two = (x.float().mean(dim=1).numpy() for x in (with_it, without))
        facts[name] = round(float(one.mean()), 4)
        if found is not alone:
            change = asdict(paired_bootstrap(one, two))
            facts[f"{name}_change"] = {key: round(value, 5) for key, value in change.items()}
    return facts


def _write(folder: Path, found: dict[str, Any]) -> None:
    text = json.dumps(found, indent=1)
    (folder / f"{found['model']}.json").write_text(f"{text}\n", encoding="utf8")


if __name__ == "__main__":
    main()
