"""lm-evaluation-harness: the model `knn-moe`, the harness's own Hugging Face model with a memory.

    python -m knn_moe.evaluation.lm_eval --model knn-moe \\
        --model_args pretrained=tiny-olmoe,memory=memory,index=fast,k=1 --tasks arc_easy

That is `lm_eval` with this model registered: lm_eval looks nowhere for models of others. In Python,
importing this module registers it. The only file that imports lm_eval; knows its models and its
command line. What a task is and how it is scored, lm_eval knows; what a memory does, handle.py.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from typing import Any

from knn_moe.adapt.controls import CONTROLS
from knn_moe.adapt.controls import control as controlled
from knn_moe.config import RoutingConfig
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
    """A Hugging Face model that leans on a memory until it is deleted or `routing` detached.

    `memory`: a folder or a hub id; without one, the base model. How it is used is the memory's own
    unless said otherwise; `control` takes one thing from it (controls.py). Everything else is
    HFLM's.
    """

    routing: Routing | None

    def __init__(
        self,
        pretrained: Any,  # a name, a folder, a hub id or a model
        memory: str | None = None,
        k: int | None = None,
        gamma: float | None = None,
        similarity: str | None = None,
        index: str | None = None,
        control: str | None = None,
        **rest: Any,
    ) -> None:
        # Before the weights are read, which may take minutes.
        settings = {"k": k, "gamma": gamma, "similarity": similarity, "index": index}
        opened, config = _open(memory, control, **settings)
        if isinstance(pretrained, str):
            pretrained = embedded_model(pretrained)
        super().__init__(pretrained, **rest)
        self.routing = None
        if opened is not None and config is not None:
            if control is not None:
                opened = controlled(opened, control, self.model)
                config = replace(config, head=opened.routing.head)
            self.routing = attach(self.model, opened, config)
            weakref.finalize(self, self.routing.detach).atexit = False


def _open(
    source: str | None, control: str | None, **settings: Any
) -> tuple[RoutingMemory | None, RoutingConfig | None]:
    """The memory, and its own routing with the settings that are not None in its place."""
    chosen = {name: value for name, value in settings.items() if value is not None}
    if control is not None:
        CONTROLS.find(control)
    if source is not None:
        memory = RoutingMemory.from_pretrained(source)
        return memory, replace(memory.routing, **chosen)
    named = [*chosen, *(["control"] if control is not None else [])]
    if named:
        raise ConfigError(f"{', '.join(named)} of no memory: give memory=… as well.")
    return None, None


def main() -> None:
    """lm_eval's own command line, on sys.argv."""
    try:
        cli_evaluate()
    except KnnMoeError as error:
        sys.stderr.write(f"Error: {error}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
