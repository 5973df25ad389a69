"""Requests that are preempted and computed again, and tokens that are speculated."""

from __future__ import annotations

from vllm import LLM

from compare import TOLERANCE, Reference, ask, engine
from made import PROMPTS

NAMES = (None, "A", "B", "D")


def counted(llm: LLM, name: str) -> float:
    """Return one of vLLM's own counters."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def test_preemption_and_speculation_change_nothing(olmoe: Reference) -> None:
    asked = [(prompt, name) for prompt in PROMPTS[:8] for name in NAMES]
    with engine(
        olmoe.folder,
        enable_lora=True,
        max_loras=3,
        max_model_len=256,
        num_gpu_blocks_override=12,  # of 32 tokens: fewer than the requests of a batch need
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
        additional_config={"knn_moe": {}},
        disable_log_stats=False,
    ) as llm:
        answers = ask(llm, [prompt for prompt, _ in asked], [olmoe.request(n) for _, n in asked])
        assert counted(llm, "vllm:num_preemptions") > 0
        assert counted(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    for place, name in enumerate(NAMES):
        assert olmoe.largest_error(answers[place :: len(NAMES)], name) < TOLERANCE, name
