"""Load a model with routers, and its tokenizer, by one name: embedded, a folder, or a hub id.

Imports torch and transformers when they are needed, so that commands can import this module and
still answer quickly.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from knn_moe.errors import ConfigError, ModelError, ModelTooLargeError
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model
from knn_moe.support.folders import expand_home
from knn_moe.support.given import kind_of_place
from knn_moe.support.hub import hub_or_cache

if TYPE_CHECKING:
    import torch

_CHOICES: Final = f"Embedded models: {', '.join(EMBEDDED_MODELS)}. A folder or a hub id works too."


def load_model(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
) -> tuple[Any, Any]:
    """Load a Mixture-of-Experts language model and its tokenizer, ready to be used.

    >>> model, tokenizer = load_model("tiny-olmoe")

    Args:
        name: An embedded model (`tiny-olmoe`, `tiny-qwen3`, `tiny-gpt-oss`), a folder, or a hub id.
        device: Where the model runs, for example "cuda:0". None: a GPU if there is one.
        dtype: The precision of the weights, as torch or by name ("float32"). "auto": as the
            checkpoint was saved.

    Returns:
        The transformers model, in evaluation mode, and its tokenizer.

    Raises:
        ConfigError: There is no such dtype.
        ModelError: There is no such model or device, or the model has no tokenizer.
        ModelTooLargeError: The model does not fit in memory.
        UnsupportedModelError: The model has no routers.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from knn_moe.routers.find import find_routers

    if not isinstance(name, str | Path):
        raise ModelError(
            f"A model is loaded by its name, and a {type(name).__name__} is none. {_CHOICES}"
        )
    name, precision = str(name), _read_dtype(dtype)
    place: Any = pick_device(device)
    structure = load_structure(name)
    find_routers(structure)  # refuses a model without routers before its weights are read
    _check_room(name, structure, place, precision)
    try:
        folder = _folder(name)
        with _reach(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=precision).to(place).eval()
    except (torch.OutOfMemoryError, MemoryError):
        raise ModelTooLargeError(f"{name!r} does not fit on {place}.") from None
    except Exception as error:  # transformers, safetensors and the hub each have their own
        raise _cannot_load(name, _first_line(error)) from None
    if not tokenizer.get_vocab():
        raise ModelError(f"{name!r} has no tokenizer: its vocabulary is empty.")
    return model, tokenizer


def load_structure(name: str) -> Any:
    """Return the model `name` without its weights, on the meta device.

    Raises:
        ModelError: Its configuration cannot be loaded.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    place = expand_home(name)
    close = get_close_matches(name, EMBEDDED_MODELS, n=1, cutoff=0.7)
    if close and name not in EMBEDDED_MODELS and not place.exists():
        raise ModelError(f"Unknown model {name!r}. Did you mean {close[0]!r}? {_CHOICES}")
    kind = None if name in EMBEDDED_MODELS else kind_of_place(name)
    if kind in ("a file", "a memory"):
        raise _cannot_load(name, f"It is {kind}. {_CHOICES}")
    if not name.strip():
        raise _cannot_load(name, f"The name is empty. {_CHOICES}")
    if name not in EMBEDDED_MODELS and place.is_dir() and not (place / "config.json").exists():
        raise _cannot_load(name, f"The folder has no config.json. {_CHOICES}")
    if name.startswith((".", "/", "~")) and not place.is_dir():
        raise _cannot_load(name, f"There is no such folder. {_CHOICES}")
    reached = True
    try:
        with _reach(_folder(name)) as reached:
            config = AutoConfig.from_pretrained(_folder(name))
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:  # transformers, safetensors and the hub each have their own
        nowhere = f"It is no folder, not in the cache, and the hub cannot be reached. {_CHOICES}"
        missing = not reached and isinstance(error, OSError)
        raise _cannot_load(name, nowhere if missing else _first_line(error)) from None


def _reach(place: str) -> AbstractContextManager[bool]:
    """Return the context to load a folder or a hub id in; it holds whether it can be reached."""
    return nullcontext(True) if Path(place).is_dir() else hub_or_cache()


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return `device`, or a GPU if there is one.

    Raises:
        ModelError: There is no such device on this machine.
    """
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(1, device=found).item()
    except (RuntimeError, AssertionError) as error:
        reason = _first_line(error).rstrip(".")
        if reason.startswith("Expected one of"):
            reason = "There is no such kind of device"
        raise ModelError(
            f"Cannot run on device {str(device)!r}: {reason}. Use another one, such as cpu."
        ) from None
    return found


def available_memory() -> int:
    """Return the bytes of RAM that are available, or a very large number if that is unknown."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62


def _folder(name: str) -> str:
    """Return what transformers loads: the folder of `name`, or the hub id that it is."""
    place = expand_home(name)
    return str(place) if place.is_dir() and name not in EMBEDDED_MODELS else embedded_model(name)


def _read_dtype(dtype: object) -> Any:
    """Return a torch dtype, or "auto"."""
    import torch

    if dtype == "auto":
        return "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f'dtype must be "auto" or name a floating-point dtype, got {dtype!r}.')
    return found


def _check_room(name: str, structure: Any, device: torch.device, dtype: Any) -> None:
    """Refuse weights that do not fit before reading them: on their way to a GPU they pass RAM."""
    import torch

    chosen = structure.dtype if dtype == "auto" else dtype
    needed = sum(parameter.numel() for parameter in structure.parameters()) * chosen.itemsize
    free_by_place = {"this machine": available_memory()}
    if device.type == "cuda":
        free_by_place[str(device)] = torch.cuda.mem_get_info(device)[0]
    for place, free in free_by_place.items():
        if needed > free:
            raise ModelTooLargeError(
                f"{name!r} has {needed / 1e9:,.3g} GB of weights, and {place} has "
                f"{free / 1e9:,.3g} GB free. Use a machine with more memory, or a smaller model."
            )


def _cannot_load(name: str, reason: str) -> ModelError:
    return ModelError(f"Cannot load a causal language model from {name!r}: {reason}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
