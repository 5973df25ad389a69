"""The whole method on a small model made on the spot, with text that is on every machine.

A small OLMoE learns from the source code of Python's standard library, then meets prose it never
saw, Python's own documentation. Some topics become its memory; others measure what that is worth.
"""

from __future__ import annotations

import math
import pydoc_data.topics
import random
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from knn_moe.build import build_memory
from knn_moe.config import BuildConfig, RoutingConfig
from knn_moe.handle import attach
from knn_moe.memory import LayerMemory, RoutingMemory

_VOCABULARY: Final = 1024
_LENGTH: Final = 128
_BATCH: Final = 16

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DemoRow:
    """One way of running the model on the test topics."""

    way: str
    nll: float
    change: float  # against zero-shot, in nats
    error: float  # standard error of the change, over windows
    accuracy: float
    mean_confidence: float | None
    changed: float | None

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


@dataclass(frozen=True)
class DemoResult:
    rows: list[DemoRow]
    reference_tokens: int
    test_tokens: int
    memory_bytes: int


def run_demo(folder: Path, steps: int, on_progress: OnProgress) -> DemoResult:
    """Train, build two memories into `folder`, and measure them."""
    code, reference, test = _texts()
    tokenizer = _train_tokenizer(code)
    model = _train_model(_windows(tokenizer, code), steps, on_progress)
    settings = BuildConfig(max_length=_LENGTH, batch_tokens=_BATCH * _LENGTH)
    paper = _build(model, tokenizer, reference, settings, folder / "paper", on_progress)
    stronger = replace(settings, steps=5, learning_rate=5.0)
    strong = _build(model, tokenizer, reference, stronger, folder / "strong", on_progress)
    wide = RoutingConfig(k=8, gamma_scale=0.1)
    ways: dict[str, tuple[RoutingMemory, RoutingConfig] | None] = {
        "zero-shot": None,
        "kNN-MoE, the paper's setting": (paper, paper.routing),
        "kNN-MoE, S=5, η=5, K=8, wide kernel": (strong, wide),
        "control: the same, values shuffled": (_shuffled(strong), wide),
    }
    windows = _windows(tokenizer, test)
    rows: list[DemoRow] = []
    baseline: Tensor | None = None
    for number, (way, routed) in enumerate(ways.items()):
        on_progress("measure", number, len(ways))
        row, losses = _measure(model, windows, way, routed, baseline)
        baseline = losses if baseline is None else baseline
        rows.append(row)
    on_progress("measure", len(ways), len(ways))
    return DemoResult(rows, len(strong), windows.numel(), strong.nbytes)


def _texts() -> tuple[list[str], list[str], list[str]]:
    """Source code to learn from; topics of the documentation, for reference and for test."""
    library = Path(sysconfig.get_paths()["stdlib"])
    draw = random.Random(0)
    files = sorted(library.glob("*.py"))
    draw.shuffle(files)
    code = [file.read_text(encoding="utf8", errors="replace") for file in files[:120]]
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    draw.shuffle(topics)
    half = len(topics) // 2
    return code, _some(topics[:half], 60_000), _some(topics[half:], 30_000)


def _some(texts: Sequence[str], characters: int) -> list[str]:
    """The first texts that hold `characters` together, each cut to a few windows."""
    kept: list[str] = []
    for text in texts:
        if sum(map(len, kept)) < characters:
            kept.append(text[:4000])
    return kept


def _train_tokenizer(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    wrap: Any = PreTrainedTokenizerFast
    return wrap(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


def _windows(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Whole windows of tokens. Shape [windows, length]."""
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    whole = len(ids) // _LENGTH * _LENGTH
    return torch.tensor(ids[:whole]).view(-1, _LENGTH)


def _train_model(windows: Tensor, steps: int, on_progress: OnProgress) -> Any:
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        output_router_logits=True,  # adds the load-balancing loss while training
    )
    make: Any = OlmoeForCausalLM
    model = make(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    for step in range(steps):
        batch = windows[torch.randint(len(windows), (_BATCH,))]
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        on_progress("train", step + 1, steps)
    config.output_router_logits = False
    return model.eval()


def _build(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    config: BuildConfig,
    folder: Path,
    on_progress: OnProgress,
) -> RoutingMemory:
    stage = f"build {folder.name}"
    return build_memory(
        model,
        tokenizer,
        texts,
        config,
        folder=folder,
        on_progress=lambda step: on_progress(stage, step.tokens, step.total_tokens),
    )


def _shuffled(memory: RoutingMemory) -> RoutingMemory:
    """Every case with another case's value: the same logits, recalled for the wrong reason."""
    order = torch.randperm(len(memory), generator=torch.Generator().manual_seed(0))
    layers = {
        index: LayerMemory(layer.keys, layer.values[order], layer.gamma)
        for index, layer in memory.layers.items()
    }
    return replace(memory, layers=layers)


def _measure(
    model: Any,
    windows: Tensor,
    way: str,
    routed: tuple[RoutingMemory, RoutingConfig] | None,
    baseline: Tensor | None,
) -> tuple[DemoRow, Tensor]:
    """A row of the result, and the mean loss of every window."""
    if routed is None:
        losses, hits = _evaluate(model, windows)
        stats = []
    else:
        with attach(model, *routed) as routing:
            losses, hits = _evaluate(model, windows)
            stats = list(routing.stats().values())
    change = losses - (losses if baseline is None else baseline)
    return DemoRow(
        way=way,
        nll=float(losses.mean()),
        change=float(change.mean()),
        error=float(change.std() / math.sqrt(len(change))),
        accuracy=hits,
        mean_confidence=sum(s.mean_confidence for s in stats) / len(stats) if stats else None,
        changed=sum(s.changed or 0.0 for s in stats) / len(stats) if stats else None,
    ), losses


@torch.no_grad()
def _evaluate(model: Any, windows: Tensor) -> tuple[Tensor, float]:
    """Mean loss of each window [windows], and the share of next tokens guessed right."""
    losses, hits = [], 0.0
    for batch in windows.split(_BATCH):
        logits = model(batch, use_cache=False).logits[:, :-1]
        targets = batch[:, 1:]
        token_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(token_loss.view(len(batch), -1).mean(dim=1))
        hits += float((logits.argmax(dim=-1) == targets).float().sum())
    return torch.cat(losses), hits / (windows.numel() - len(windows))
