"""Train the project's own small Mixture-of-Experts models from scratch.

    python experiments/train.py experiments/recipes/tiny-*.json --out OUT

Reads the text of the seen domains, trains one tokenizer for all recipes unless OUT has one, and
trains each recipe in a process of its own, because small models leave most of a large GPU idle.
Writes OUT/NAME, a folder for `from_pretrained`. Its `training.json` has the losses of every epoch
and domain, each expert's load, and how expert use differs between domains.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.multiprocessing as processes
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from common import Arguments, add_data_and_device, device_name, make_parser, write_json
from corpus import (
    SEEN,
    UNSEEN,
    cut_windows,
    encode_documents,
    load_validation_windows,
    read_texts,
    train_tokenizer,
)
from expert_balance import describe_expert_balance, losses_by_domain


@dataclass(frozen=True)
class Recipe:
    """A model to train: the fields of its transformers config, and how to train it."""

    name: str
    model_type: str
    config: dict[str, Any]
    epochs: float = 12
    length: int = 512  # tokens in a window
    batch: int = 64  # windows in a step
    learning_rate: float = 3e-3
    warmup: float = 0.03  # share of the steps
    weight_decay: float = 0.1
    balance: float = 0.02  # weight of the load-balancing loss
    clip: float = 1.0
    seed: int = 0
    domains: tuple[str, ...] = SEEN

    @staticmethod
    def read(path: Path) -> Recipe:
        """Read a recipe from JSON; the file's name is the model's name."""
        return Recipe(name=path.stem, **json.loads(path.read_text(encoding="utf8")))


@dataclass(frozen=True)
class TrainingRun:
    """Where a training reads its text and writes its model, and how it runs."""

    data: Path
    out: Path
    device: str
    compiled: bool
    max_steps: int | None = None  # stop early, to try a recipe or to time it

    @property
    def tokenizer(self) -> Path:
        return self.out / "tokenizer"


def main(arguments: Arguments = None) -> None:
    """Train every recipe."""
    parser = make_parser(__doc__)
    parser.add_argument("recipes", nargs="+", type=Path, help="JSON files, one for each model")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer and models")
    add_data_and_device(parser)
    parser.add_argument("--eager", action="store_true", help="do not use torch.compile")
    parser.add_argument("--max-steps", type=int, help="stop each training after so many steps")
    options = parser.parse_args(arguments)
    run = TrainingRun(
        data=options.data,
        out=options.out,
        device=options.device,
        compiled=not options.eager,
        max_steps=options.max_steps,
    )
    recipes = [Recipe.read(path) for path in options.recipes]
    prepare_tokenizer(run, recipes[0])
    if len(recipes) == 1:
        train(recipes[0], run)
        return
    context = processes.get_context("spawn")
    workers = [context.Process(target=train, args=(recipe, run)) for recipe in recipes]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("At least one training failed. Its error is printed above.")


def prepare_tokenizer(run: TrainingRun, recipe: Recipe) -> None:
    """Train the tokenizer on the recipe's text, unless there is one."""
    if run.tokenizer.exists():
        return
    texts = [text for domain in recipe.domains for text in read_texts(run.data, domain, "train")]
    train_tokenizer(texts, recipe.config["vocab_size"]).save_pretrained(run.tokenizer)


def train(recipe: Recipe, run: TrainingRun) -> None:
    """Train, measure and save one model."""
    started = time.perf_counter()
    set_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer)
    documents = [
        document
        for domain in recipe.domains
        for document in encode_documents(tokenizer, read_texts(run.data, domain, "train"))
    ]
    model = make_model(recipe, tokenizer).to(run.device)
    seen, unseen = (
        load_validation_windows(tokenizer, run.data, domains)
        for domains in (recipe.domains, UNSEEN)
    )
    history = fit(model, recipe, documents, seen, run)
    history["seconds"] = round(time.perf_counter() - started, 1)
    model.config.router_aux_loss_coef = recipe.balance
    report = {
        "recipe": recipe.name,
        "settings": asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "active": active_parameters(model),
        "domains": list(recipe.domains),
        "train_tokens": sum(map(len, documents)),
        "history": history,
        "losses": losses_by_domain(model, seen | unseen),
        "experts": describe_expert_balance(model, seen),
        "versions": {"torch": torch.__version__, "device": device_name(run.device)},
    }
    folder = run.out / recipe.name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / "training.json", report)
    print(f"{recipe.name}: {json.dumps(report['losses'])}", flush=True)


def make_model(recipe: Recipe, tokenizer: Any) -> Any:
    """Make an untrained model of the recipe's shape, in bf16."""
    config = AutoConfig.for_model(
        recipe.model_type,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        router_aux_loss_coef=0.0,  # transformers' own balances all layers together, not each
        **recipe.config,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.config.dtype = torch.bfloat16
    return model.bfloat16()


def fit(
    model: Any, recipe: Recipe, documents: list[Tensor], seen: dict[str, Tensor], run: TrainingRun
) -> dict[str, Any]:
    """Train for the recipe's epochs and return the history of losses."""
    generator = torch.Generator().manual_seed(recipe.seed)
    per_epoch = sum(map(len, documents)) // (recipe.length * recipe.batch) - 1
    steps = min(int(recipe.epochs * per_epoch), run.max_steps or 1 << 62)
    optimiser = MasterAdamW(model, recipe)
    objective = Objective(model, recipe.balance)
    forward = torch.compile(objective) if run.compiled else objective
    history: dict[str, Any] = {"train": [], "valid": [], "tokens": 0}
    step, started = 0, time.perf_counter()
    while step < steps:
        epoch = cut_windows(documents, recipe.length, generator).to(run.device)
        losses = []
        for batch in epoch.long().split(recipe.batch)[: min(per_epoch, steps - step)]:
            loss, next_token_loss = forward(batch)
            loss.backward()
            optimiser.step(learning_rate(step / steps, recipe))
            losses.append(next_token_loss)
            step += 1
        valid = losses_by_domain(model, seen)
        history["train"].append(round(float(torch.stack(losses).mean()), 4))
        history["valid"].append(round(sum(valid.values()) / len(valid), 4))
        history["tokens"] = step * recipe.batch * recipe.length
        pace = history["tokens"] / (time.perf_counter() - started)
        print(
            f"{recipe.name}: step {step:,} of {steps:,}, train {history['train'][-1]:.3f}, "
            f"valid {history['valid'][-1]:.3f}, {pace:,.0f} tokens/s",
            flush=True,
        )
    return history


class Objective(torch.nn.Module):
    """The next-token loss plus a penalty on layers that use their experts unevenly."""

    def __init__(self, model: Any, balance: float) -> None:
        super().__init__()
        self.model = model
        self.balance = balance

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss to minimise and the next-token loss in it. Shapes: batch [B, T]."""
        output = self.model(
            input_ids=batch, labels=batch, use_cache=False, output_router_logits=True
        )
        logits = torch.stack([layer.flatten(0, -2) for layer in output.router_logits])
        imbalance = load_imbalance(logits, self.model.config.num_experts_per_tok)
        return output.loss + self.balance * imbalance, output.loss.detach()


def load_imbalance(logits: Tensor, top_k: int) -> Tensor:
    """Return how unevenly layers use their experts: 1 is even, experts / top_k is the worst.

    This is the load-balancing loss of the Switch Transformer (eq. 4), averaged over layers.

    Shapes: logits [layers, tokens, experts].
    """
    probabilities = logits.float().softmax(dim=-1)
    chosen = probabilities.topk(top_k, dim=-1).indices
    picked = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0 / top_k)
    shares = picked.mean(dim=1) * probabilities.mean(dim=1)
    return logits.shape[-1] * shares.sum(dim=-1).mean()


class OptimiserSettings(Protocol):
    """What the optimiser and the learning rate need of a recipe."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float: ...


class MasterAdamW:
    """AdamW on fp32 copies of bf16 weights, so that small steps are not lost in rounding.

    Args:
        model: The model; its frozen weights are left alone.
        settings: Weight decay, which spares vectors, and the norm that gradients are clipped to.
        factor: Maps the name of a weight to the multiple of the learning rate it is trained with.
    """

    def __init__(
        self,
        model: Any,
        settings: OptimiserSettings,
        factor: Callable[[str], float] = lambda name: 1.0,
    ) -> None:
        self.clip = settings.clip
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.weights = [weight for _, weight in named]
        self.masters = [weight.detach().float() for weight in self.weights]
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for (name, _), master in zip(named, self.masters, strict=True):
            decay = settings.weight_decay if master.ndim >= 2 else 0.0
            groups.setdefault((decay, factor(name)), []).append(master)
        self.optimiser = torch.optim.AdamW(
            [
                {"params": masters, "weight_decay": decay, "factor": multiple}
                for (decay, multiple), masters in groups.items()
            ],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            fused=self.masters[0].is_cuda,
        )

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Clip the gradients, update the weights and clear the gradients."""
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate * group["factor"]
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = torch.zeros_like(master) if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimiser.step()
        torch._foreach_copy_(self.weights, self.masters)


def learning_rate(progress: float, settings: OptimiserSettings) -> float:
    """Return the rate after a share of the steps: linear warm-up, then a cosine to a twentieth."""
    if progress < settings.warmup:
        return settings.learning_rate * progress / settings.warmup
    turn = (progress - settings.warmup) / (1 - settings.warmup)
    return settings.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * turn)))


def active_parameters(model: Any) -> int:
    """Count the parameters that one token uses: of each layer's experts, only the chosen ones."""
    total = 0
    for name, parameter in model.named_parameters():
        share = model.config.num_experts_per_tok / parameter.shape[0] if ".experts." in name else 1
        total += int(parameter.numel() * share)
    return total


if __name__ == "__main__":
    main()
