"""LoRA adapters and TRL's trainer. The only file that imports peft and trl, where they are used.

Adapters go on every linear map but the output embedding: on `nn.Linear` modules, and on the
parameters by which transformers 5 keeps what once were such modules, a router's matrix [N, d] and
the experts' [N, in, out] or [N, out, in]. They are found by their shape and place, in any family.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from knn_moe.errors import MissingDependencyError, UnsupportedModelError
from knn_moe.methods.training_loop import (
    Changes,
    Course,
    Trainable,
    TuneConfig,
    Window,
    collate,
    rebuilt,
)
from knn_moe.routers.find import block_of, find_routers
from knn_moe.routers.model_state import freeze, input_device

_CURE: Final = "pip install 'knn-moe[tune]'"


def has_trl() -> bool:
    return all(find_spec(name) is not None for name in ("trl", "datasets", "accelerate"))


def require_trl() -> None:
    if not has_trl():
        raise MissingDependencyError(f"trainer='trl' needs TRL: {_CURE}, or trainer='plain'.")


@dataclass(frozen=True)
class LowRank:
    """ΔW = scale · left right. Shapes: left [..., a, r]; right [..., r, b]."""

    left: Tensor
    right: Tensor
    scale: float

    def onto(self, weight: Tensor) -> Tensor:
        left, right = (part.to(weight.device, torch.float32) for part in (self.left, self.right))
        return (weight.float() + self.scale * (left @ right)).to(weight.dtype)


@dataclass(frozen=True)
class Targets:
    """Names of linear modules, and of parameters that are linear maps by themselves."""

    modules: list[str]
    parameters: list[str]


def linear_maps(model: nn.Module) -> Targets:
    """Every linear map of a model but its output embedding."""
    holder: Any = model
    output = holder.get_output_embeddings()
    modules = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    ]
    inside = {id(model.get_submodule(name).weight) for name in modules}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for router in find_routers(model):
        block = block_of(model, router.name)
        experts = [weight for weight in block.parameters() if weight.ndim == 3]
        if not experts and not any(id(weight) in inside for weight in _besides(block, router)):
            raise UnsupportedModelError(
                f"The experts beside router {router.name!r} are no matrices that can be tuned. "
                f"Load the model unquantised (for GPT-OSS: Mxfp4Config(dequantize=True))."
            )
        found += [weight for weight in (router.weight, *experts) if id(weight) not in inside]
    return Targets(modules, [names[id(weight)] for weight in found])


def _besides(block: nn.Module, router: Any) -> list[nn.Parameter]:
    own = {id(weight) for weight in router.module.parameters()}
    return [weight for weight in block.parameters() if id(weight) not in own]


@contextmanager
def adapters(model: nn.Module, config: TuneConfig) -> Iterator[Trainable]:
    """LoRA adapters on all linear maps, to be trained, as long as this lasts. They are fp32
    whatever the model's dtype; drawn from torch's global generator."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingDependencyError(f"Adapters need PEFT: {_CURE}.") from None
    holder: Any = model
    targets = linear_maps(model)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=targets.modules,
        target_parameters=targets.parameters,
    )
    with freeze(model), rebuilt(model):
        adapted: Any = get_peft_model(holder, lora)
        layers = dict(_adapter_layers(adapted.get_base_model()))
        missing = {f"{name}.weight" for name in targets.modules} | set(targets.parameters)
        missing -= set(layers)
        if missing:
            raise UnsupportedModelError(f"PEFT put no adapter on {sorted(missing)[0]!r}.")

        def changes() -> Changes:
            return {name: _low_rank(layer) for name, layer in layers.items()}

        yield Trainable(adapted, changes)


def _adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers by the name of the parameter they adapt."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            bare = name.replace(".base_layer", "")
            yield f"{bare}.{getattr(module, 'parameter_name', 'weight')}", module


@torch.no_grad()
def _low_rank(layer: Any) -> LowRank:
    """A copy of a layer's factors, in the shape of the parameter they change.

    Experts' factors lie side by side in PEFT: A as [N·r, in], B as [out, r·N].
    """
    (name,) = layer.active_adapters
    right = layer.lora_A[name].weight.detach().clone()
    left = layer.lora_B[name].weight.detach().clone()
    count = getattr(layer, "num_experts", 1)
    if count > 1:
        right = right.view(count, -1, right.shape[1])
        left = left.view(left.shape[0], -1, count).permute(2, 0, 1)
        if getattr(layer.get_base_layer(), "is_transposed", False):  # W is [N, in, out]
            left, right = right.mT, left.mT
    return LowRank(left.contiguous(), right.contiguous(), layer.scaling[name])


class _Order(Sampler[int]):
    """The course's own order of windows; a trainer tells the epoch."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.course.order(self.epoch))

    def __len__(self) -> int:
        return len(self.course.split.train)


def train_with_trl(course: Course, tokenizer: Any) -> None:
    """By TRL's SFTTrainer, on our tokens, labels, order and optimiser; it adds the load-balancing
    loss as the model's config weighs it. Nothing is left on disk."""
    import trl
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    library: Any = trl  # it says nothing of its types

    class Trainer(library.SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: object = None) -> Sampler[int]:
            return _Order(course)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            course.step_done(float(loss))
            return loss

    class Epochs(TrainerCallback):
        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            course.epoch_done()

    train = course.split.train
    columns = {
        "input_ids": [window.ids for window in train],
        "labels": [window.labels for window in train],
    }
    with tempfile.TemporaryDirectory() as folder, _hushed():
        trainer = Trainer(
            model=course.trainable.model,
            args=_arguments(course, folder),
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
            # Ours also keeps TRL from choosing a padding token for model and tokenizer.
            data_collator=_collate_rows,
            optimizers=course.optimiser(),
            callbacks=[Epochs()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def _collate_rows(rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    return collate([Window(row["input_ids"], row["labels"]) for row in rows])


def _arguments(course: Course, folder: str) -> Any:
    import trl

    library: Any = trl
    config = course.config
    return library.SFTConfig(
        output_dir=folder,
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_size,
        learning_rate=course.rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        seed=course.seed,
        use_cpu=input_device(course.trainable.model).type == "cpu",
        bf16=False,  # the model's own dtype, no other under it
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


@contextmanager
def _hushed() -> Iterator[None]:
    """transformers says nothing short of errors."""
    from transformers.utils import logging as theirs

    logging: Any = theirs
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
