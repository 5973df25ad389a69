"""Merging in Python: what is refused, and what is warned of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from helpers.zoo import BUILD, TEXTS, family, make_texts
from knn_moe import RoutingMemory, build_memory
from knn_moe.errors import MemoryFormatError, MemoryMismatchError
from knn_moe.memory.merging import describe_merge


def test_the_same_memory_is_refused(
    zoo_memory: RoutingMemory, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    again = build_memory(family("olmoe"), zoo_tokenizer, TEXTS, BUILD)
    for same in (zoo_memory, again, replace(zoo_memory, folder=None)):
        with pytest.raises(MemoryMismatchError, match="memory 1 and memory 2 are the same"):
            zoo_memory.merge(same)


def test_the_same_texts_with_other_values_are_merged_and_told(
    zoo_memory: RoutingMemory, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    larger = replace(BUILD, learning_rate=9.0)
    other = build_memory(family("olmoe"), zoo_tokenizer, TEXTS, larger)
    with pytest.warns(UserWarning, match=r"learning_rate 5 in memory 1, 9 in memory 2\. Each case"):
        merged = zoo_memory.merge(other)
    assert len(merged) == 2 * len(zoo_memory)
    assert merged.build == zoo_memory.build
    assert any("12 examples are in more than one" in one for one in describe_merge([merged, other]))


def test_of_three_memories_only_those_that_differ_are_named(
    zoo_memory: RoutingMemory, zoo_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = family("olmoe")
    alike = build_memory(model, zoo_tokenizer, make_texts(2, seed=7), BUILD)
    other = build_memory(model, zoo_tokenizer, make_texts(2, seed=8), replace(BUILD, steps=2))
    with pytest.warns(UserWarning, match="steps 1 in memory 1, 2 in memory 3. Each"):
        zoo_memory.merge(alike, other)


def test_a_memory_can_be_named_by_its_folder_and_nothing_else_is_one(
    zoo_memory: RoutingMemory, zoo_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    other = build_memory(family("olmoe"), zoo_tokenizer, make_texts(2, seed=7), BUILD)
    other.save_pretrained(tmp_path / "other")
    assert len(zoo_memory.merge(tmp_path / "other")) == len(zoo_memory) + len(other)
    with pytest.raises(MemoryFormatError, match="and None is neither"):
        zoo_memory.merge(None)  # type: ignore[arg-type]
