"""A batch of prompts continued by a model, with a memory attached or without.

Knows token ids; nothing of tasks, examples or memories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knn_moe.routers.model_state import input_device


@torch.no_grad()
def continued(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    samples: int = 1,
    temperature: float = 0.0,
) -> Tensor:
    """What follows each prompt: the likeliest token after the other, or, at a temperature, samples
    of all tokens, drawn from torch's own generator. Prompts are padded on the left, under a mask.

    Shapes: [prompts × samples, tokens], those of one prompt together, padded after their end.
    """
    padding = tokenizer.pad_token_id
    padding = tokenizer.eos_token_id if padding is None else padding
    longest = max(map(len, prompts))
    ids = [[padding or 0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    device = input_device(model)
    drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    written: Tensor = model.generate(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=torch.tensor(mask, device=device),
        max_new_tokens=max_new_tokens,
        do_sample=bool(temperature),
        num_beams=1,
        num_return_sequences=samples,
        pad_token_id=padding or 0,
        **drawn,
    )
    return written[:, longest:]
