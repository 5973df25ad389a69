"""Every method by name, and how it is prepared on a reference set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from knn_moe.errors import ConfigError
from knn_moe.methods.method import Method
from knn_moe.methods.task_context import Setting

NOTHING, MEMORY, REFERENCE = "nothing", "memory", "reference"  # what a method learns from


@dataclass(frozen=True)
class Entry:
    """A method there is. `prepare` names a function from Setting to Method: "module:function",
    imported when it is asked for, since some need parts that not everybody has installed."""

    title: str
    prepare: str
    needs: str = REFERENCE
    texts: bool = True  # whether it can be asked for plain text, which has no question
    package: str | None = None  # that it cannot do without, beyond the base install

    def load(self, setting: Setting) -> Method:
        module, _, function = self.prepare.partition(":")
        prepared = getattr(import_module(f"knn_moe.methods.{module}"), function)(setting)
        if not isinstance(prepared, Method):
            raise TypeError(f"{self.prepare} made {prepared!r}, which is no Method.")
        return prepared

    @property
    def installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None


_EMBEDDING: Final = "sentence_transformers"
METHODS: Final = {
    "zero-shot": Entry("Zero-shot", "method:prepare_zero_shot", NOTHING),
    "5-shot": Entry("5-shot", "few_shot:prepare_few_shot", texts=False, package=_EMBEDDING),
    "sft": Entry("SFT", "sft:prepare_sft", package="peft"),
    "sft-router": Entry("SFT (Router Only)", "sft:prepare_router_sft"),
    "knn": Entry("kNN-MoE", "knn_moe:prepare_knn", MEMORY),
    "knn-paper": Entry("kNN-MoE (the paper's setting)", "knn_moe:prepare_paper"),
    "knn-calibrated": Entry("kNN-MoE (calibrated)", "calibrated:prepare_calibrated"),
    "knn-ivfpq": Entry("kNN-MoE (IVFPQ)", "knn_moe:prepare_ivfpq", MEMORY, package="faiss"),
    "knn-selective": Entry("kNN-MoE (Selective)", "selective:prepare_selective", MEMORY),
    "knn-gated": Entry("kNN-MoE (gated by entropy)", "selective:prepare_gated", MEMORY),
    "knn-shuffled": Entry("Control: values shuffled", "controls:prepare_shuffled", MEMORY),
    "knn-random": Entry("Control: random neighbours", "controls:prepare_random", MEMORY),
    "knn-own-logits": Entry(
        "Control: the router's own logits", "controls:prepare_own_logits", MEMORY
    ),
    "c3po": Entry("C3PO (NGD)", "c3po:prepare_ngd", texts=False, package=_EMBEDDING),
    "c3po-kernel": Entry(
        "C3PO (kernel regression)",
        "c3po:prepare_kernel_regression",
        texts=False,
        package=_EMBEDDING,
    ),
    "c3po-mode": Entry(
        "C3PO (mode finding)", "c3po:prepare_mode_finding", texts=False, package=_EMBEDDING
    ),
    "knn-lm": Entry("kNN-LM", "knn_lm:prepare_knn_lm"),
    "knn+knn-lm": Entry("kNN-MoE + kNN-LM", "knn_lm:prepare_both"),
    "knn-calibrated+knn-lm": Entry(
        "kNN-MoE (calibrated) + kNN-LM", "calibrated:prepare_calibrated_both"
    ),
    "knn-calibrated+head": Entry("kNN-MoE (calibrated) with its head", "calibrated:prepare_head"),
    "router-bias": Entry("Router bias on the fly", "router_bias:prepare_router_bias", NOTHING),
}


@dataclass(frozen=True)
class Prepared:
    """A method, the seconds it took to prepare, and what it was prepared on, as JSON takes it."""

    method: Method
    seconds: float
    on: Mapping[str, Any]


def method_named(name: str) -> Entry:
    entry = METHODS.get(name)
    if entry is None:
        meant = get_close_matches(name, METHODS, n=1)
        hint = f" Did you mean {meant[0]!r}?" if meant else ""
        raise ConfigError(f"Unknown method {name!r}.{hint} Available: {', '.join(METHODS)}.")
    return entry


def prepare(name: str, setting: Setting) -> Prepared:
    """Prepare a method on a setting's reference set. What it shares with another counts in full."""
    entry = method_named(name)
    setting.borrowed = 0.0
    started = time.perf_counter()
    method = entry.load(setting)
    seconds = time.perf_counter() - started + setting.borrowed
    return Prepared(method, seconds, prepared_on(name, setting))


def prepared_on(name: str, setting: Setting) -> Mapping[str, Any]:
    """What of a setting matters to a method, known before it is prepared."""
    return {} if method_named(name).needs == NOTHING else setting.facts()
