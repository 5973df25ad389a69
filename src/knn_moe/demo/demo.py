"""The demo from end to end: build two memories, measure them and a control, look closely.

Knows the order of the work and how far along it is; each step is another room's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from knn_moe.adapt.controls import shuffle_values
from knn_moe.build.build import build_memory
from knn_moe.config import BuildConfig
from knn_moe.demo.measure import expert_use, measure_alone, measure_with, score, terciles
from knn_moe.demo.passages import pick_passages
from knn_moe.demo.result import DemoResult, MemoryFacts
from knn_moe.demo.texts import DemoText, make_test_set, sample_reference
from knn_moe.memory.memory import RoutingMemory
from knn_moe.reference.examples import Example
from knn_moe.routers.find import find_routers
from knn_moe.routers.fingerprint import identify

OnProgress = Callable[[float, str], None]  # the share of all work done; what is being done

PAPER: Final = "kNN-MoE (paper)"
STRONG: Final = "kNN-MoE (strong)"
CONTROL: Final = "control: values shuffled"

# Roughly how long each stage takes on two cores, in the order they run.
_STAGES: Final = {
    "building the paper memory": 6.0,
    "building the strong memory": 42.0,
    "measuring zero-shot": 3.0,
    "measuring the paper memory": 14.0,
    "measuring the strong memory": 16.0,
    "measuring the control": 16.0,
    "tracing passages": 2.0,
}


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """How much text is read; the defaults take about two minutes on two cores."""

    length: int = 256  # tokens in a window
    reference_tokens: int = 20_000
    windows: int = 48
    choices: int = 100


@dataclass
class Demo:
    """One run: a model, the text it is tried on, and someone who watches."""

    model: Any
    tokenizer: Any
    text: DemoText
    config: DemoConfig
    on_progress: OnProgress

    def run(self, folder: Path) -> DemoResult:
        """Build memories into `folder`, as `paper` and `strong`, and measure them."""
        config, text = self.config, self.text
        test = make_test_set(
            text.test, self.tokenizer, config.length, config.windows, config.choices
        )
        reference = sample_reference(text.reference, self.tokenizer, config.reference_tokens)
        paper, paper_facts = self._build(reference, PAPER, folder / "paper")
        strong, strong_facts = self._build(reference, STRONG, folder / "strong")
        model, control = self.model, shuffle_values(strong)
        alone = measure_alone(model, test, self._watch("measuring zero-shot"))
        routed = [
            measure_with(model, memory, test, way, self._watch(stage))
            for memory, way, stage in (
                (paper, PAPER, "measuring the paper memory"),
                (strong, STRONG, "measuring the strong memory"),
                (control, CONTROL, "measuring the control"),
            )
        ]
        watch = self._watch("tracing passages")
        passages = pick_passages(model, self.tokenizer, strong, test, (alone, routed[1]))
        watch(1.0)
        routers = find_routers(model)
        return DemoResult(
            model=identify(model, routers).name,
            reference=text.reference_name,
            reference_tokens=len(strong.provenance.stream),
            test=text.test_name,
            layers=tuple(strong.layers),
            top_k=routers[0].top_k,
            test_tokens=test.windows.numel(),
            test_windows=len(test.windows),
            choices=len(test.contexts),
            memories=(paper_facts, strong_facts),
            scores=tuple(score(way, alone, control=way.way == CONTROL) for way in (alone, *routed)),
            experts=expert_use(alone, routed[1]),
            terciles=terciles([alone, *routed], alone),
            passages=passages,
        )

    def _build(
        self, reference: list[Example], way: str, folder: Path
    ) -> tuple[RoutingMemory, MemoryFacts]:
        """A memory by the preset that its folder is named after."""
        preset = folder.name
        settings = BuildConfig(preset=preset, max_length=self.config.length, batch_tokens=2048)
        watch, started = self._watch(f"building the {preset} memory"), time.monotonic()
        memory = build_memory(
            self.model,
            self.tokenizer,
            reference,
            settings,
            folder=folder,
            on_progress=lambda step: watch(step.tokens / step.total_tokens),
        )
        routing = settings.routing()
        words = (
            f"S = {settings.steps}, η = {settings.learning_rate:g}, {settings.gradient} gradient, "
            f"K = {routing.k}, γ × {routing.gamma_scale:g}"
        )
        seconds = time.monotonic() - started
        return memory, MemoryFacts(way, words, preset, len(memory), memory.nbytes, seconds)

    def _watch(self, stage: str) -> Callable[[float], None]:
        """Tells how far the whole demo is from how far one stage is."""
        names, total = list(_STAGES), sum(_STAGES.values())
        before = sum(_STAGES[name] for name in names[: names.index(stage)])

        def report(share: float) -> None:
            self.on_progress((before + share * _STAGES[stage]) / total, stage)

        report(0.0)
        return report
