"""Write an embedded model of knn-moe in a form that vLLM loads.

    python -m knn_moe_vllm.export tiny-olmoe FOLDER

vLLM's OLMoE and GPT-OSS ignore tied embeddings, its GPT-OSS reads YaRN's fields, and its experts
want an intermediate size that 32 divides. The model computes the same, and memories of the embedded
model are memories of the copy.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from knn_moe.errors import ModelError
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model
from safetensors.torch import load_file, save_file
from torch import Tensor

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_STEP = 32  # the intermediate size is made a multiple of it


def export(name: str, folder: Path) -> None:
    """Write the embedded model `name` to `folder`.

    Raises:
        ModelError: There is no such model, or the folder exists.
    """
    if name not in EMBEDDED_MODELS:
        raise ModelError(f"{name!r} is no embedded model. There are: {', '.join(EMBEDDED_MODELS)}.")
    if folder.exists():
        raise ModelError(f"{str(folder)!r} exists. Choose another folder.")
    source = Path(embedded_model(name))
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(_WEIGHTS, _CONFIG))
    tensors = load_file(source / _WEIGHTS)
    config = json.loads((source / _CONFIG).read_text(encoding="utf8"))
    if config["tie_word_embeddings"]:
        config["tie_word_embeddings"] = False
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if config["model_type"] == "gpt_oss":
        _adapt_gpt_oss(tensors, config)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(config, indent=2) + "\n"
    (folder / _CONFIG).write_text(text, encoding="utf8")


def _adapt_gpt_oss(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Pad the experts with units of weight 0, and describe the rotary embedding as YaRN's of
    factor 1, which it is."""
    missing = -config["intermediate_size"] % _STEP
    padding = {
        "gate_up_proj": (0, 2 * missing),  # gates and ups take turns
        "gate_up_proj_bias": (0, 2 * missing),
        "down_proj": (0, 0, 0, missing),
    }
    for name, tensor in tensors.items():
        pads = padding.get(name.rpartition("experts.")[2])
        if pads is not None:
            tensors[name] = F.pad(tensor, pads).contiguous()
    config["intermediate_size"] += missing
    config["rope_parameters"] = {
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "rope_type": "yarn",
        "factor": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
        "truncate": False,
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m knn_moe_vllm.export", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", choices=EMBEDDED_MODELS)
    parser.add_argument("folder", type=Path, help="a new folder")
    given = parser.parse_args()
    try:
        export(given.name, given.folder)
    except ModelError as error:
        parser.error(str(error))
    print(f"Wrote {given.name} to {given.folder}.")


if __name__ == "__main__":
    main()
