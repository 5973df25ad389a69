"""vLLM's answers against transformers with an attached memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from knn_moe import attach
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

TOLERANCE = 1e-2  # of log-probabilities
NEW_TOKENS = 12


@dataclass
class Reference:
    """A model as transformers runs it, and memories for it."""

    folder: Path
    model: Any
    tokenizer: Any
    memories: dict[str, Path]

    def request(self, name: str | None) -> LoRARequest | None:
        """Return what names a memory in a request."""
        if name is None:
            return None
        return LoRARequest(name, 1 + list(self.memories).index(name), str(self.memories[name]))

    def greedy(self, prompt: str, name: str | None) -> str:
        """Return the text that follows a prompt."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        attached = nullcontext() if name is None else attach(self.model, self.memories[name])
        with torch.no_grad(), attached:
            tokens = self.model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        new = tokens[0, inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(new, skip_special_tokens=True))

    def largest_error(self, answers: Sequence[RequestOutput], name: str | None) -> float:
        """Return the largest difference of a chosen token's log-probability; inf if transformers
        would have chosen another."""
        worst = 0.0
        attached = nullcontext() if name is None else attach(self.model, self.memories[name])
        with torch.no_grad(), attached:
            for answer in answers:
                asked, chosen = answer.prompt_token_ids, answer.outputs[0]
                tokens = torch.tensor([[*asked, *chosen.token_ids]])
                logits = self.model(tokens).logits[0, len(asked) - 1 : -1]
                expected = logits.float().log_softmax(dim=-1)
                for row, token, told in zip(
                    expected, chosen.token_ids, chosen.logprobs, strict=True
                ):
                    if int(row.argmax()) != token:
                        return float("inf")
                    worst = max(worst, abs(float(row[token]) - told[token].logprob))
        return worst


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[LLM]:
    """Start an engine in this process, and end it."""
    usual = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_batched_tokens": 96,  # of one pass: longer prompts are read in chunks
        "max_num_seqs": 16,
        "block_size": 32,
    }
    try:
        llm = LLM(str(folder), **usual | settings)
        yield llm
        llm.llm_engine.engine_core.shutdown()
        del llm
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


def ask(
    llm: LLM, prompts: Sequence[Any], requests: Sequence[LoRARequest | None]
) -> list[RequestOutput]:
    """Return the greedy answers to all prompts, which are given at once."""
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=1, ignore_eos=True)
    asked = [{"prompt_token_ids": each} if isinstance(each, list) else each for each in prompts]
    return llm.generate(asked, greedy, lora_request=list(requests), use_tqdm=False)


def chosen(answers: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    """Return the tokens of the answers."""
    return [tuple(answer.outputs[0].token_ids) for answer in answers]


def told(answers: Sequence[RequestOutput]) -> list[list[tuple[int, float]]]:
    """Return the tokens of the answers with their log-probabilities."""
    return [
        [
            (token, each[token].logprob)
            for token, each in zip(
                answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True
            )
        ]
        for answer in answers
    ]
