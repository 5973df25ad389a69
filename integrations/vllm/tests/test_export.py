"""An embedded model and the copy that vLLM loads compute the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from knn_moe import find_routers
from knn_moe.errors import ModelError
from knn_moe.routers.fingerprint import fingerprint
from knn_moe.support.embedded_models import EMBEDDED_MODELS, embedded_model

from knn_moe_vllm.export import export
from made import PROMPTS, load


@pytest.mark.parametrize("name", EMBEDDED_MODELS)
def test_the_copy_computes_the_same(name: str, tmp_path: Path) -> None:
    export(name, tmp_path / "copy")
    (own, tokenizer), (copy, _) = load(Path(embedded_model(name))), load(tmp_path / "copy")
    assert fingerprint(find_routers(copy)) == fingerprint(find_routers(own))
    inputs = tokenizer(PROMPTS[-1], return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(copy(**inputs).logits, own(**inputs).logits)


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "knn_moe_vllm.export"]
    done = subprocess.run(
        [*command, "tiny-qwen3", tmp_path / "copy"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"Wrote tiny-qwen3 to {tmp_path / 'copy'}.\n"
    again = subprocess.run([*command, "tiny-qwen3", tmp_path], capture_output=True, text=True)
    assert again.returncode == 2
    assert "exists. Choose another folder." in again.stderr
    with pytest.raises(ModelError, match="is no embedded model"):
        export("tiny", tmp_path / "other")
