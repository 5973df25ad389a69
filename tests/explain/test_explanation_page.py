"""The page of an explanation: complete, self-contained, and safe for hostile text."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.explained import make_token
from helpers.html_page import Page
from knn_moe import RoutingMemory, attach
from knn_moe.explain.explanation import Explanation
from knn_moe.explain.page import LEVELS, render_explanation


def test_the_page_is_whole_and_loads_nothing(
    zoo_olmoe: PreTrainedModel, zoo_memory: RoutingMemory, prompt: Tensor, zoo_tokenizer: Any
) -> None:
    with attach(zoo_olmoe, zoo_memory) as routing:
        explanation = routing.explain(torch.cat([prompt, prompt.flip(1)]), tokenizer=zoo_tokenizer)
    html = render_explanation(explanation)
    parsed = Page(html)
    assert parsed.open == []
    assert not re.search(r"https?://|url\(|@import|<link|<iframe|<img", html)
    assert not any({"src", "href", "srcset"} & attrs.keys() for _, attrs in parsed.tags)
    assert len(parsed.scripts) == 3
    for sequence, script in zip(explanation.sequences, parsed.scripts, strict=False):
        data = json.loads(script)
        assert [token["text"] for token in data] == [token.text for token in sequence]
        for token, shown in zip(sequence, data, strict=True):
            assert [case["layer"] for case in shown["cases"]] == [0, 1]
            assert shown["change"].startswith(f"Mean λ {token.confidence:.2f}; experts changed in ")
            for effect, panel in zip(token.effects, shown["cases"], strict=True):
                assert panel["token"] == effect.cases[0].token
                assert len(panel["in"]) == len(effect.experts_in)
                assert all(re.fullmatch(r"\d \([+−]?\d+\.\d\d\)", one) for one in panel["in"])
    coloured = [sum(token.confidence >= level for level in LEVELS) for token in explanation.tokens]
    texts = parsed.with_class("t")[len(LEVELS) + 1 :]
    assert [attrs["class"] for attrs in texts] == [f"t up-{c}" if c else "t" for c in coloured]


def test_hostile_text_stays_text() -> None:
    bad = "</script><script>alert(1)</script><!-- <b onclick='x'>&amp;\u2028\ud800"
    explanation = Explanation(
        (0,), ((make_token(bad, 1, before=bad, token=bad, after=bad),),), bad, bad
    )
    html = render_explanation(explanation)
    parsed = Page(html)
    assert parsed.open == []
    assert len(parsed.scripts) == 2
    assert "<!--" not in html
    assert not any(tag == "b" for tag, _ in parsed.tags)
    shown = json.loads(parsed.scripts[0])[0]
    assert [shown["text"], *(shown["cases"][0][p] for p in ("before", "token", "after"))] == [
        bad
    ] * 4


def test_nothing_recalled_and_nothing_found_are_said() -> None:
    silent = Explanation((), ((make_token("a", 0),),))
    assert "nothing was recalled" in Page(render_explanation(silent)).text
    far = make_token("a", 1, cases=())
    assert '"distance": "\\u2013"' in render_explanation(Explanation((0,), ((far,),)))
