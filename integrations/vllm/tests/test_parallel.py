"""Several processes: tensor parallelism with a memory for each request, a pipeline with one memory.

On a CPU, vLLM 0.32 runs pipelines only compiled, and does not compile with --enable-lora.
"""

from __future__ import annotations

from compare import TOLERANCE, Reference, ask, engine
from made import PROMPTS

NAMES = (None, "A", "B", "C")


def test_tensor_parallelism(olmoe: Reference) -> None:
    asked = [(prompt, name) for prompt in PROMPTS[:12] for name in NAMES]
    with engine(
        olmoe.folder,
        enable_lora=True,
        max_loras=3,
        additional_config={"knn_moe": {}},
        distributed_executor_backend="mp",
        tensor_parallel_size=2,
    ) as llm:
        answers = ask(llm, [prompt for prompt, _ in asked], [olmoe.request(n) for _, n in asked])
    for place, name in enumerate(NAMES):
        assert olmoe.largest_error(answers[place :: len(NAMES)], name) < TOLERANCE, name


def test_a_pipeline(olmoe: Reference) -> None:
    with engine(
        olmoe.folder,
        enforce_eager=False,
        additional_config={"knn_moe": {"memory": str(olmoe.memories["A"])}},
        distributed_executor_backend="mp",
        pipeline_parallel_size=2,
    ) as llm:
        answers = ask(llm, PROMPTS[:12], [None] * 12)
    assert olmoe.largest_error(answers, "A") < TOLERANCE
