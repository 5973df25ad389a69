"""The tables of each part of a study, and how many tokens its questions have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from knn_moe.evaluation.evaluate import prepare_questions
from knn_moe.reproduce.pretrained import plan as p
from knn_moe.reproduce.pretrained import sweeps, tables
from knn_moe.reproduce.pretrained.compare import Comparer
from knn_moe.reproduce.pretrained.study import PretrainedStudy
from knn_moe.reproduce.table import Table
from knn_moe.reproduce.write import write_all_tables, write_table

TABLES: Final[Mapping[str, tuple[tables.MakeTable, ...]]] = {
    p.ACCURACY: (tables.summary_table, tables.accuracy_table, tables.details_table(p.ACCURACY)),
    p.TEXT_LOSS: (tables.text_table, tables.details_table(p.TEXT_LOSS)),
    p.GROWTH: (sweeps.growth_table,),
    p.TRANSFER: (sweeps.transfer_table,),
    p.TOGETHER: (sweeps.together_table,),
    p.GENERATION: (tables.generation_table, tables.details_table(p.GENERATION)),
}


def make_tables(study: PretrainedStudy) -> list[Table]:
    """Make the tables of the study's parts from the runs that are there, and write them."""
    comparer = Comparer(study)
    made = [make(comparer) for part in study.plan.parts for make in TABLES[part]]
    found = [table for table in made if table.rows]
    for table in found:
        write_table(table, study.folder)
    if found:
        write_all_tables(found, study.folder)
    return found


def count_tokens(study: PretrainedStudy, tokenizer: Any) -> Iterator[tuple[str, int, int, int]]:
    """Yield of each task its name, its questions, the tokens that are read, and the batches.

    A context counts once for all its choices. Nothing is counted for what is generated.
    """
    for task in study.plan.tasks:
        asked = prepare_questions(tokenizer, study.data(task), study.eval_config(task))
        tokens = sum(
            len(question.ids) + sum(len(ids) for ids, _ in question.choices)
            for question in asked.questions
        )
        yield task, len(asked.questions), tokens, len(asked.batches)
