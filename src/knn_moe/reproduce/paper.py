"""The numbers that the paper prints, to be shown beside those measured here.

Its models are OLMoE-1B-7B-0125-Instruct, GPT-OSS-20B and Qwen3-30B-A3B-Instruct-2507.
"""

from __future__ import annotations

from typing import Final

from knn_moe.reproduce.table import PrintedTable

_MODELS: Final = ("OLMoE", "GPT-OSS", "Qwen3")
_TASKS: Final = ("GPQA", "MMLU", "SuperGPQA", "USMLE", "MedMCQA", "MBPP", "Avg.")


def _table(caption: str, columns: tuple[str, ...], *lines: str) -> PrintedTable:
    """Read a table: one line for each row, with two spaces or more between cells."""
    rows = (tuple(part.strip() for part in line.split("  ") if part.strip()) for line in lines)
    return PrintedTable(caption, columns, tuple(rows))


PAPER: Final = {
    "main": _table(
        "Accuracy (%); † better than zero-shot, p < 0.05.",
        ("model", "method", *_TASKS),
        "OLMoE  Zero-shot  27.27  46.77  13.02  32.81  35.57  30.00  26.82",
        "OLMoE  5-shot  21.72  33.06  11.09  31.31  25.36  28.50  20.30",
        "OLMoE  SFT  21.72  46.89  13.67†  37.84†  34.78  31.60  27.26†",
        "OLMoE  SFT (Router Only)  24.24  45.27  11.66  31.22  34.23  29.60  25.41",
        "OLMoE  kNN-MoE  29.80  47.81†  13.27†  35.04†  37.01†  32.20  27.53†",
        "OLMoE  kNN-MoE (IVFPQ)  29.80  47.79†  13.14†  35.04†  36.98†  31.83  27.44†",
        "GPT-OSS  Zero-shot  43.94  70.20  23.52  67.29  56.20  55.00  43.27",
        "GPT-OSS  5-shot  36.87  63.72  19.95  60.02  52.76  46.83  38.61",
        "GPT-OSS  SFT  41.92  70.28  24.83†  65.61  56.06  48.83  43.85†",
        "GPT-OSS  SFT (Router Only)  41.41  69.18  18.83  65.05  54.89  45.00  40.09",
        "GPT-OSS  kNN-MoE  45.45  70.28  24.35†  68.31†  57.06†  56.50  43.88†",
        "GPT-OSS  kNN-MoE (IVFPQ)  44.95  70.30  24.14†  68.13†  57.14†  56.17  43.77†",
        "Qwen3  Zero-shot  41.41  78.59  34.85  75.30  62.51  59.80  52.93",
        "Qwen3  5-shot  44.44  80.48†  35.56  77.17†  66.58†  62.33  54.41†",
        "Qwen3  SFT  39.90  79.08  40.20†  80.80†  66.60†  55.33  56.44†",
        "Qwen3  SFT (Router Only)  43.94  78.36  33.15  76.05  66.03†  56.83  52.27",
        "Qwen3  kNN-MoE  44.95  78.86†  35.15  76.70†  66.65†  61.83  53.66†",
        "Qwen3  kNN-MoE (IVFPQ)  43.43  78.79  35.13  76.14  66.70†  61.83  53.61†",
    ),
    "perplexity": _table(
        "Points of accuracy over zero-shot, by the third of the test set's perplexity; OLMoE.",
        ("benchmark", "high", "mid", "low"),
        "GPQA  +6.15  +2.99  -1.52",
        "SuperGPQA  +0.17  +0.65  -0.06",
        "MMLU  +2.07  +1.15  -0.13",
        "USMLE  +6.32  +1.41  -1.13",
        "MedMCQA  +6.04  +1.13  +0.56",
    ),
    "selective": _table(
        "Accuracy (%); OLMoE.",
        ("method", "GPQA", "MMLU", "USMLE"),
        "kNN-MoE  29.80  47.81  35.04",
        "kNN-MoE (Selective)  30.30  47.85  35.41",
    ),
    "reference-size": _table(
        "Accuracy (%) on MedMCQA by the number of reference questions.",
        ("reference", *_MODELS),
        "0  35.57  56.20  62.51",
        "250  35.99  56.41  66.01",
        "500  36.87  56.92  66.68",
        "1,000  37.01  57.06  66.65",
    ),
    "neighbours": _table(
        "Accuracy (%) on MedMCQA by K.",
        ("K", *_MODELS),
        "1  37.01  57.06  66.65",
        "3  36.89  56.55  65.76",
        "5  36.02  56.74  65.98",
        "10  36.34  56.11  65.19",
    ),
    "steps": _table(
        "Accuracy (%) on MedMCQA by S.",
        ("S", *_MODELS),
        "1  37.01  57.06  66.65",
        "3  37.05  57.12  66.58",
        "10  36.98  57.01  66.71",
    ),
    "construction-time": _table(
        "Hours to prepare on 1,000 examples; OLMoE, one A100 (IVFPQ: 0.21 more).",
        ("reference", "SFT", "SFT (Router Only)", "kNN-MoE"),
        "1,000  1.34  1.33  0.46",
    ),
    "inference-speed": _table(
        "Seconds an example, by the number of reference examples; one A100.",
        ("reference", "kNN-MoE", "kNN-MoE (IVFPQ)"),
        "0  5.99  5.99",
        "250  6.19  6.14",
        "500  6.41  6.16",
        "1,000  6.83  6.21",
    ),
    "memory-use": _table(
        "VRAM (GB) while answering, by the number of reference examples; one A100.",
        ("reference", "kNN-MoE", "kNN-MoE (IVFPQ)"),
        "0  16.02  16.02",
        "250  19.31  16.21",
        "500  22.47  16.94",
        "1,000  28.81  17.53",
    ),
    "c3po": _table(
        "Accuracy (%); OLMoE. Which variant of C3PO is not said.",
        ("method", "GPQA", "MMLU", "USMLE"),
        "Zero-shot  27.27  46.77  32.81",
        "C3PO  24.24  48.04  32.93",
        "kNN-MoE  29.80  47.81  35.04",
    ),
    "load-balancing": _table(
        "Mean load-balancing loss on GPQA; OLMoE, whose top 8 of 64 make 8 the least.",
        ("Zero-shot", "SFT", "SFT (Router Only)", "kNN-MoE"),
        "8.27  8.29  8.28  8.29",
    ),
    "similarity": _table(
        "Accuracy (%) on MedMCQA by similarity.",
        ("similarity", *_MODELS),
        "RBF  37.01  57.06  66.65",
        "RBF + L2 Norm  36.52  56.19  66.68",
        "Cosine  36.69  56.01  66.65",
    ),
    "top1-share": _table(
        "Mean share of the nearest of K = 5 cases in their similarity.",
        ("benchmark", *_MODELS),
        "GPQA  0.91  0.82  0.94",
        "MMLU  0.78  0.76  0.83",
        "MedMCQA  0.88  0.85  0.93",
    ),
    "seeds": _table(
        "Accuracy (%), mean ± standard deviation over seeds; OLMoE.",
        ("benchmark", "SFT", "SFT (Router Only)"),
        "GPQA  22.56±1.89  23.39±1.89",
        "MMLU  46.21±1.02  45.67±0.95",
        "USMLE  38.29±0.51  31.59±0.32",
    ),
}
