"""Generate continuations of a batch of prompts.

Knows token ids; nothing of tasks, examples or memories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knn_moe.routers.model_state import input_device


@torch.no_grad()
def generate_tokens(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    samples: int = 1,
    temperature: float = 0.0,
) -> Tensor:
    """Return the tokens that `model` generates after each prompt, without the prompt.

    Args:
        tokenizer: For its padding token. Prompts are padded on the left, under a mask.
        prompts: Token ids, of any lengths.
        max_new_tokens: The most tokens to generate.
        samples: Continuations of each prompt.
        temperature: 0: greedy. Otherwise tokens are sampled with torch's global generator.

    Shapes: result [prompts × samples, tokens], those of one prompt together, padded at the end.
    """
    padding = tokenizer.pad_token_id
    padding = (tokenizer.eos_token_id if padding is None else padding) or 0
    longest = max(map(len, prompts))
    ids = [[padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    device = input_device(model)
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    generated: Tensor = model.generate(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=torch.tensor(mask, device=device),
        max_new_tokens=max_new_tokens,
        do_sample=bool(temperature),
        num_beams=1,
        num_return_sequences=samples,
        pad_token_id=padding,
        **sampling,
    )
    return generated[:, longest:]
