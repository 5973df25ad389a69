"""Prompts without completions become examples: labels of the model's own, those worth keeping."""

from knn_moe.labelling.config import LabelConfig
from knn_moe.labelling.endpoint import EndpointJudge
from knn_moe.labelling.label import Judge, Labelled, label, save_labelled, summary
from knn_moe.labelling.prompts import Prompt, load_prompts

__all__ = [
    "EndpointJudge",
    "Judge",
    "LabelConfig",
    "Labelled",
    "Prompt",
    "label",
    "load_prompts",
    "save_labelled",
    "summary",
]
