"""The model `knn-moe` for lm-evaluation-harness: its Hugging Face model with a memory attached.

    python -m knn_moe.harness --model knn-moe \\
        --model_args pretrained=tiny-olmoe,memory=memory,index=fast,k=1 --tasks arc_easy

This is the command `lm_eval` with the model registered, because lm_eval does not load models from
other packages. In Python, importing this module registers the model. This is the only file that
imports lm_eval.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from typing import Any

from knn_moe.adapt.controls import CONTROLS
from knn_moe.adapt.controls import control as make_control
from knn_moe.errors import ConfigError, KnnMoeError, MissingDependencyError
from knn_moe.inference.attach import Routing, attach
from knn_moe.memory.memory import RoutingMemory
from knn_moe.support.embedded_models import embedded_model

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise MissingDependencyError(
        f"The harness needs lm-eval ({error}): pip install 'knn-moe[eval]'."
    ) from None


@register_model("knn-moe")
class KnnMoeLM(HFLM):  # type: ignore[misc]
    """A Hugging Face model with a memory attached until it is deleted or `routing` is detached.

    Args:
        pretrained: The name of an embedded model, a folder, a hub id, or a model.
        memory: A folder or a hub id. None: the base model.
        k: Replaces the memory's own value, as do `gamma`, `similarity` and `index`.
        control: Replace the memory by this control of it: "shuffled", "random" or "own-logits".
        rest: The arguments of HFLM.

    Raises:
        ConfigError: An argument is out of range, or has no effect without a memory.
        MemoryMismatchError: The memory belongs to another model.
    """

    routing: Routing | None

    def __init__(
        self,
        pretrained: Any,
        memory: str | None = None,
        k: int | None = None,
        gamma: float | None = None,
        similarity: str | None = None,
        index: str | None = None,
        control: str | None = None,
        **rest: Any,
    ) -> None:
        # Everything is checked before the weights are loaded, which may take minutes.
        options: dict[str, Any] = {"k": k, "gamma": gamma, "similarity": similarity, "index": index}
        changes = {name: value for name, value in options.items() if value is not None}
        if control is not None:
            CONTROLS.find(control)
        opened = _open_memory(memory, [*changes, *(["control"] if control else [])])
        config = None if opened is None else replace(opened.routing, **changes)
        if isinstance(pretrained, str):
            pretrained = embedded_model(pretrained)
        super().__init__(pretrained, **rest)
        self.routing = None
        if opened is not None and config is not None:
            if control is not None:
                opened = make_control(opened, control, self.model)
                config = replace(config, head=opened.routing.head)
            self.routing = attach(self.model, opened, config)
            weakref.finalize(self, self.routing.detach).atexit = False


def _open_memory(source: str | None, options: list[str]) -> RoutingMemory | None:
    if source is not None:
        return RoutingMemory.from_pretrained(source)
    if options:
        verb = "has" if len(options) == 1 else "have"
        raise ConfigError(f"{', '.join(options)} {verb} no effect without a memory. Add memory=….")
    return None


def main() -> None:
    """Run lm_eval's command line."""
    try:
        cli_evaluate()
    except KnnMoeError as error:
        sys.stderr.write(f"Error: {error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
