"""kNN-LM: the mixture equals a plain loop on any model, and leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers import tiny
from helpers.quiz import WORDS
from helpers.unchanged import left_as_it_was
from helpers.zoo import family, make_texts
from knn_moe.errors import ConfigError, ReferenceSetError, UnsupportedModelError
from knn_moe.evaluation.evaluate import EvalConfig, evaluate
from knn_moe.index import IndexConfig, KeyIndex, build_index
from knn_moe.inference.hidden_states import HiddenStateHook
from knn_moe.inference.language_head import HeadMixture, HiddenHead
from knn_moe.methods import TaskContext, prepare
from knn_moe.methods.knn_lm import (
    KnnLm,
    KnnLmConfig,
    TokenStore,
    choose,
    hold_out,
    prepare_knn_lm,
    read_store,
)
from knn_moe.methods.knn_moe import routing_memory
from knn_moe.recall.next_token import TokenIndex
from knn_moe.support.embedded_models import EMBEDDED_MODELS
from knn_moe.tasks import Task, TaskData, Text
from knn_moe.tasks.likelihood import token_losses

GIVEN = KnnLmConfig(k=6, weight=0.3, temperature=90.0)


def sentences(count: int, seed: int) -> list[dict[str, str]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 30, (count,), generator=draw).tolist()
    drawn = [torch.randint(len(WORDS), (length,), generator=draw) for length in lengths]
    return [{"text": " ".join(WORDS[place] for place in places)} for places in drawn]


TASK = Task(name="words", title="Words", kind=Text(), files="words")
DATA = TaskData(TASK, sentences(6, seed=1), sentences(14, seed=0), "made up")


@pytest.fixture(scope="module", params=EMBEDDED_MODELS)
def each_context(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> TaskContext:
    model = tiny.trained(request.param)
    return TaskContext(model, tiny_tokenizer, DATA, "text", length=24, preset="paper")


@pytest.fixture(scope="module")
def olmoe_context(tiny_tokenizer: Any) -> TaskContext:
    return TaskContext(tiny.trained("tiny-olmoe"), tiny_tokenizer, DATA, "text", length=24)


@pytest.fixture(params=["gemma4_text", "granitemoe", "jamba"])
def other_family(request: pytest.FixtureRequest, zoo_tokenizer: Any) -> TaskContext:
    """Families that cap or scale the logits, or have recurrent layers."""
    rows = [{"text": text} for text in make_texts(9)]
    return TaskContext(family(request.param), zoo_tokenizer, TaskData(TASK, rows, rows, ""), "text")


def windows(context: TaskContext) -> Iterator[Tensor]:
    """Yield the reference texts, cut into windows."""
    for row in context.rows:
        yield from torch.tensor(context.tokenizer(row["text"])["input_ids"]).split(context.length)


@torch.no_grad()
def states(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs of the output embedding [T, d] and the logits [T, V] of a sequence."""
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits = model(ids[None], use_cache=False).logits
    handle.remove()
    return seen[0][0], logits[0]


def slow_mixture(context: TaskContext, config: KnnLmConfig, ids: Tensor) -> Tensor:
    """Return p(y | x) of each token by a plain loop over all stored tokens."""
    store = []
    for window in windows(context):
        hidden, _ = states(context.model, window)
        store += list(zip(hidden, window[1:].tolist(), strict=False))
    hidden, logits = states(context.model, ids)
    rows = []
    for query, own in zip(hidden, logits, strict=True):
        near = sorted((float((query - key).square().sum()), value) for key, value in store)
        inside, outside = near[config.k - 1][0], near[config.k][0]
        assert outside - inside > 5e-5 * outside, "a near tie: the result depends on rounding"
        near = near[: config.k]
        shares = torch.softmax(torch.tensor([-d / config.temperature for d, _ in near]), dim=0)
        row = (1 - config.weight) * own.float().softmax(dim=0)
        for share, (_, value) in zip(shares, near, strict=True):
            row[value] += config.weight * share
        rows.append(row)
    return torch.stack(rows)


def check_mixture(context: TaskContext, ids: Tensor, temperature: float) -> None:
    config = replace(GIVEN, temperature=temperature)
    expected = slow_mixture(context, config, ids)
    method = prepare_knn_lm(context, config)
    with method.apply_to(context.model), torch.no_grad():
        logits = context.model(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits.exp(), expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(logits.softmax(dim=-1), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_mixture_is_that_of_a_plain_loop(each_context: TaskContext) -> None:
    ids = each_context.tokenizer("the green stone, some rain")["input_ids"]
    check_mixture(each_context, torch.tensor(ids), temperature=90)


def test_the_mixture_of_other_families(other_family: TaskContext, prompt: Tensor) -> None:
    check_mixture(other_family, prompt[0], temperature=20)


@pytest.mark.slow
def test_the_store_holds_the_tokens_of_a_routing_memory(each_context: TaskContext) -> None:
    """Padding of batches is not stored."""
    store = read_store(each_context)
    memory = routing_memory(each_context).provenance
    starts = set(memory.begin.tolist())
    rows = [row for row in range(len(memory)) if row + 1 not in starts]
    assert store.values.tolist() == memory.stream[torch.tensor(rows) + 1].tolist()
    assert store.example.tolist() == memory.example[rows].tolist()
    keys, own = [], []
    for window in windows(each_context):
        hidden, logits = states(each_context.model, window)
        keys.append(hidden[:-1])
        likelihoods = logits[:-1].log_softmax(dim=-1)
        own.append(likelihoods.gather(1, window[1:, None])[:, 0])
    torch.testing.assert_close(store.keys, torch.cat(keys), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(store.log_likelihood, torch.cat(own), rtol=1e-3, atol=1e-3)


def test_without_weight_it_is_the_model_alone(olmoe_context: TaskContext) -> None:
    ids = torch.tensor([olmoe_context.tokenizer(DATA.test[0]["text"])["input_ids"]])
    alone = olmoe_context.model(ids).logits
    with prepare_knn_lm(olmoe_context, replace(GIVEN, weight=0.0)).apply_to(olmoe_context.model):
        assert torch.equal(olmoe_context.model(ids).logits, alone)
        assert not olmoe_context.model._forward_hooks


def test_a_stored_token_predicts_what_followed_it(each_context: TaskContext) -> None:
    method = prepare_knn_lm(each_context, KnnLmConfig(k=1, weight=0.999, temperature=1.0))
    text = max(windows(each_context), key=len)
    with method.apply_to(each_context.model):
        losses = token_losses(each_context.model, text[None], 1)
    # Texts with the same first words differ later, so the first tokens are ambiguous.
    assert losses.correct[0, 3:].all()
    assert float(losses.nll[0, 3:].max()) < 0.01
    assert not token_losses(each_context.model, text[None], 1).correct.all()


def test_greedy_generation_takes_the_likeliest_token(olmoe_context: TaskContext) -> None:
    """Generation uses a cache, computes only the last logits, and pads on the left."""
    method = prepare_knn_lm(olmoe_context, replace(GIVEN, weight=0.8))
    model, prompts = olmoe_context.model, ["the river some", "a green mountain two birds"]
    ids = [olmoe_context.tokenizer(prompt)["input_ids"] for prompt in prompts]
    longest = max(map(len, ids))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    asked: Any = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    with method.apply_to(model), torch.no_grad():
        written = model.generate(padded, **asked, pad_token_id=0)[:, longest:]
        for row, new in zip(ids, written.tolist(), strict=True):
            for token in new:
                likeliest = model(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()
                assert token == int(likeliest)
                row.append(token)
    assert written.tolist() != model.generate(padded, **asked, pad_token_id=0)[:, longest:].tolist()


def test_a_model_in_bf16(tiny_tokenizer: Any) -> None:
    model = tiny.trained("tiny-qwen3").to(torch.bfloat16)
    context = TaskContext(model, tiny_tokenizer, DATA, "text", length=24)
    method = prepare_knn_lm(context)
    assert context.cached("knn-lm-store", lambda: None).keys.dtype == torch.bfloat16
    ids = torch.tensor([tiny_tokenizer(DATA.test[0]["text"])["input_ids"]])
    with method.apply_to(model), torch.no_grad():
        logits = model(ids, use_cache=False).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.exp().sum(dim=-1), torch.ones(ids.shape))


def test_a_peft_model(zoo_tokenizer: Any, prompt: Tensor) -> None:
    from peft import LoraConfig, get_peft_model

    rows = [{"text": text} for text in make_texts(6)]
    data = TaskData(TASK, rows, rows, "")
    wrapped = get_peft_model(family("olmoe"), LoraConfig(r=4, target_modules=["q_proj"]))
    alone = wrapped(input_ids=prompt).logits.log_softmax(dim=-1)
    with prepare_knn_lm(TaskContext(wrapped, zoo_tokenizer, data, "text"), GIVEN).apply_to(wrapped):
        mixed = wrapped(input_ids=prompt).logits
    lost = (mixed - alone).detach()
    assert float(lost.min()) == pytest.approx(math.log(0.7), abs=1e-5)
    assert float(lost.max()) > 0


@pytest.mark.slow
def test_the_model_is_left_as_it_was(olmoe_context: TaskContext) -> None:
    model: Any = olmoe_context.model
    with left_as_it_was(model):
        method = prepare("knn+knn-lm", olmoe_context).method
        with method.apply_to(model):
            model(torch.tensor([[5, 6, 7]]))
        with pytest.raises(IndexError), method.apply_to(model):
            model(torch.tensor([[5, 6, 1 << 20]]))  # no such token


def made_up(examples: int, tokens: int, *, telling: bool) -> TokenStore:
    """Make keys far from all others; `telling`: every other example has similar ones."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(examples, tokens, 8, generator=draw) * 10
    values = torch.randint(1000, (examples, tokens), generator=draw)
    if telling:
        keys = keys[:1] + torch.randn(keys.shape, generator=draw) * 0.1
        values = values[:1].expand_as(values)
    example = torch.arange(examples)[:, None].expand_as(values)
    own = torch.full((examples * tokens,), -1.0)
    return TokenStore(keys.flatten(0, 1), values.flatten(), own, example.flatten())


def test_held_out_examples_are_not_in_the_searched_store() -> None:
    """Otherwise each token would find itself; here other examples do not help."""
    chosen, held_out = choose(made_up(20, 10, telling=False), KnnLmConfig(), seed=0)
    assert chosen.weight == 0.0
    assert held_out == {"tokens": 30, "nll_alone": 1.0, "nll": 1.0}


def test_the_choice_helps_held_out_examples() -> None:
    chosen, held_out = choose(made_up(20, 10, telling=True), KnnLmConfig(), seed=0)
    assert chosen.weight == 0.9
    expected = -math.log(0.1 * math.exp(-1.0) + 0.9)
    assert held_out["nll"] == pytest.approx(expected, abs=1e-4)
    given, other = choose(made_up(20, 10, telling=True), KnnLmConfig(k=3, weight=0.2), seed=0)
    assert (given.k, given.weight) == (3, 0.2)
    assert held_out["nll"] < other["nll"] < 1.0


def test_the_held_out_loss_is_that_of_the_head(olmoe_context: TaskContext) -> None:
    """Evaluate the held-out examples with a head that has all others in its store."""
    store = read_store(olmoe_context)
    config, held_out = choose(store, KnnLmConfig(weight=0.3), olmoe_context.seed)
    asked, rest = hold_out(store, olmoe_context.seed)
    examples = asked.example.unique().tolist()
    assert len(examples) == 2
    assert not set(examples) & set(rest.example.tolist())
    losses = []
    with KnnLm(rest.build_index(IndexConfig()), config).apply_to(olmoe_context.model):
        for number in examples:
            ids = torch.tensor(
                olmoe_context.tokenizer(olmoe_context.rows[number]["text"])["input_ids"]
            )
            for window in ids.split(olmoe_context.length):
                losses.append(token_losses(olmoe_context.model, window[None], 1).nll[0])
    assert held_out["nll"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-4)


def test_the_test_set_has_no_influence(tiny_tokenizer: Any, olmoe_context: TaskContext) -> None:
    facts = []
    for test in (DATA.test, DATA.reference):
        data = TaskData(TASK, test, DATA.reference, "")
        facts.append(
            prepare(
                "knn-lm", TaskContext(olmoe_context.model, tiny_tokenizer, data, "text")
            ).method.facts()
        )
    assert facts[0] == facts[1]


def make_head(index: KeyIndex, values: Tensor, mixture: HeadMixture) -> HiddenHead:
    return HiddenHead(HiddenStateHook(family("olmoe")), TokenIndex(index, values), mixture)


def test_an_empty_search_result_leaves_the_model_alone() -> None:
    class Blind:
        """Finds nothing, as an approximate index may."""

        def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
            empty = torch.zeros(len(queries), k, dtype=torch.long)
            return torch.full(empty.shape, torch.inf), empty

        def tensors(self) -> dict[str, Tensor]:
            return {}

    logits = torch.randn(6, 11)
    head = make_head(Blind(), torch.tensor([4]), HeadMixture(1, 0.3, 90.0))
    mixed = head.mix(torch.randn(6, 5), logits)
    torch.testing.assert_close(mixed, logits.log_softmax(dim=-1))


def test_an_approximate_index_finds_about_the_same() -> None:
    keys = torch.randn(600, 64) @ torch.randn(64, 64)
    values = torch.randint(50, (600,))
    logits, hidden = torch.randn(40, 50), keys[:40] + 0.01 * torch.randn(40, 64)
    mixed = []
    for kind in ("exact", "fast"):
        index = build_index(keys, IndexConfig(kind=kind), torch.device("cpu"))
        head = make_head(index, values, HeadMixture(4, 0.5, 10.0))
        mixed.append(head.mix(hidden, logits).exp())
    assert float((mixed[0] - mixed[1]).abs().mean()) < 1e-3
    assert float((mixed[0] - logits.softmax(dim=-1)).abs().mean()) > 1e-2


@pytest.mark.slow
def test_evaluations_alone_and_combined(olmoe_context: TaskContext, tmp_path: Path) -> None:
    config = EvalConfig(length=24, batch_size=4)
    losses = {}
    for name in ("zero-shot", "knn", "knn-lm", "knn+knn-lm"):
        prepared = prepare(name, olmoe_context)
        run = evaluate(
            olmoe_context.model,
            olmoe_context.tokenizer,
            DATA,
            prepared,
            config,
            folder=tmp_path / name,
        )
        losses[name] = sum(sample.nll or 0.0 for sample in run.samples) / len(run.samples)
        facts = run.facts["method_facts"]
        if name == "knn-lm":
            assert {"cases", "k", "weight", "temperature", "held_out"} <= set(facts)
            assert facts["held_out"]["nll"] < facts["held_out"]["nll_alone"]
        elif name == "knn+knn-lm":
            assert set(facts) == {"knn", "knn-lm"}
    assert len(set(losses.values())) == 4
    # The texts repeat the same few words, so both methods learn from them.
    assert losses["knn-lm"] < losses["zero-shot"]
    assert losses["knn+knn-lm"] < losses["knn"] < losses["zero-shot"]


def test_wrong_values_are_refused(tiny_tokenizer: Any, olmoe_context: TaskContext) -> None:
    for wrong, told in (
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"weight": 1.0}, "weight must be at least 0 and less than 1, got 1.0"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ):
        with pytest.raises(ConfigError, match=told):
            KnnLmConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ReferenceSetError, match="needs at least two examples"):
        choose(made_up(1, 10, telling=True), KnnLmConfig(), seed=0)
    one = TaskData(TASK, DATA.test, [{"text": "a"}], "")
    with pytest.raises(ReferenceSetError, match="needs an example of at least two tokens"):
        prepare_knn_lm(TaskContext(olmoe_context.model, tiny_tokenizer, one, "text"))
    with (
        prepare_knn_lm(olmoe_context, GIVEN).apply_to(olmoe_context.model),
        pytest.raises(UnsupportedModelError, match="return_dict=True"),
    ):
        olmoe_context.model(torch.tensor([[5, 6]]), return_dict=False)
