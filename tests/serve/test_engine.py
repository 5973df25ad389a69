"""Each answer is routed by its own memory: what a batch says is what each says alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeAlias

import pytest
import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel

from helpers.near_ties import assert_no_near_ties
from helpers.served import PROBES, two_memories
from helpers.tiny import trained, words
from helpers.zoo import BUILD, family, make_texts
from knn_moe import HeadConfig, RoutingConfig, RoutingMemory, attach, build_memory, find_routers
from knn_moe.errors import BusyError, MemoryMismatchError, StoppedError, UnknownMemoryError
from knn_moe.serve import batches
from knn_moe.serve.engine import Engine, EngineConfig
from knn_moe.serve.jobs import Began, Ended, Job
from knn_moe.serve.probe import quiet_transformers
from knn_moe.serve.sampling import Sampling, Token

PROMPTS = 24
LENGTH = 6  # tokens of an answer
GREEDY = Sampling(temperature=0.0, logprobs=1)
NAMES = (None, "medicine", "law")


@pytest.fixture(scope="module", params=["tiny-olmoe", "tiny-qwen3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return trained(request.param)


@pytest.fixture(scope="module")
def memories(model: PreTrainedModel) -> dict[str, RoutingMemory]:
    return two_memories(model, words())


class Answer:
    """A job and what came of it."""

    def __init__(self, prompt: Sequence[int], memory: str | None, **options: Any) -> None:
        self.events: SimpleQueue[Any] = SimpleQueue()
        sampling = options.get("sampling", GREEDY)
        most = options.get("max_tokens", LENGTH)
        ends = frozenset(options.get("ends", ()))
        self.job = Job(prompt, memory, sampling, most, ends, self.events.put)

    def tokens(self) -> list[Token]:
        """Wait for the end."""
        tokens = []
        while not isinstance(event := self.events.get(timeout=60), Ended):
            if isinstance(event, Token):
                tokens.append(event)
        assert event.error is None
        return tokens


def ask(engine: Engine, answers: Sequence[Answer]) -> list[list[Token]]:
    engine.submit([answer.job for answer in answers])
    return [answer.tokens() for answer in answers]


@torch.no_grad()
def say_alone(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float], float]:
    """What `generate` says: tokens, their log-probabilities, and the closest second token."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    top = [score[0].log_softmax(-1).topk(2) for score in output.scores]
    ids = [int(each.indices[0]) for each in top]
    values = [float(each.values[0]) for each in top]
    return ids, values, min(float(each.values[0] - each.values[1]) for each in top)


Said: TypeAlias = dict[str | None, tuple[list[int], list[float]]]


def find_prompts(
    model: PreTrainedModel,
    memories: dict[str, RoutingMemory],
    count: int,
    lengths: tuple[int, int],
) -> dict[tuple[int, ...], Said]:
    """Find prompts without near ties, and what each memory says alone after them."""
    draw = torch.Generator().manual_seed(0)
    found: dict[tuple[int, ...], Said] = {}
    for _ in range(200):
        length = int(torch.randint(*lengths, (), generator=draw))
        prompt = torch.randint(5, 2000, (length,), generator=draw).tolist()
        said: Said = {}
        for name in NAMES:
            if name is None:
                ids, values, gap = say_alone(model, prompt)
            else:
                with attach(model, memories[name]):
                    ids, values, gap = say_alone(model, prompt)
                try:
                    assert_no_near_ties(model, memories[name], torch.tensor([prompt + ids]))
                except AssertionError:
                    break
            if gap < 0.01:
                break
            said[name] = ids, values
        else:
            found[tuple(prompt)] = said
        if len(found) == count:
            return found
    raise AssertionError("Nearly every prompt has a near tie. Take other data.")


@pytest.fixture(scope="module")
def expected(
    model: PreTrainedModel, memories: dict[str, RoutingMemory]
) -> dict[tuple[int, ...], Said]:
    """What each memory says alone after each prompt."""
    return find_prompts(model, memories, PROMPTS, (3, 14))


@pytest.fixture
def engine(
    model: PreTrainedModel, memories: dict[str, RoutingMemory], request: pytest.FixtureRequest
) -> Iterator[Engine]:
    config = getattr(request, "param", EngineConfig())
    made = Engine(model, config, PROBES)
    for name, memory in memories.items():
        made.load(name, memory, memory.routing)
    yield made
    made.stop()
    assert not any(router.scope._forward_pre_hooks for router in find_routers(model))


CONFIGS = {
    "many": EngineConfig(at_once=80),
    "a small cache": EngineConfig(at_once=80, cache_tokens=256),  # jobs are put off and read again
    "one by one": EngineConfig(batched=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", CONFIGS.values(), ids=CONFIGS, indirect=True)
def test_each_answer_is_that_of_its_memory_alone(engine: Engine, expected: Any) -> None:
    wanted = [(prompt, name) for prompt in expected for name in NAMES]
    assert len(wanted) == PROMPTS * 3
    said = ask(engine, [Answer(prompt, name) for prompt, name in wanted])
    for (prompt, name), tokens in zip(wanted, said, strict=True):
        ids, values = expected[prompt][name]
        assert [token.id for token in tokens] == ids
        for token, value in zip(tokens, values, strict=True):
            assert token.logprob == pytest.approx(value, abs=1e-2)
    texts = [{tuple(said[name][0]) for name in NAMES} for said in expected.values()]
    assert sum(len(each) == 3 for each in texts) > PROMPTS / 2  # memories do say other things


@pytest.mark.slow
def test_the_memories_are_not_swapped(engine: Engine, expected: Any) -> None:
    swapped = {None: None, "medicine": "law", "law": "medicine"}
    wanted = [(prompt, name) for prompt in expected for name in NAMES]
    said = ask(engine, [Answer(prompt, swapped[name]) for prompt, name in wanted])
    same = [
        [token.id for token in tokens] == expected[prompt][name][0]
        for (prompt, name), tokens in zip(wanted, said, strict=True)
        if name is not None
    ]
    assert sum(same) < len(same) / 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-olmoe"], indirect=True)
def test_stats_count_each_memory_s_own_tokens(
    engine: Engine, model: PreTrainedModel, memories: dict[str, RoutingMemory], expected: Any
) -> None:
    prompts = list(expected)[:4]
    before = engine.stats()
    ask(engine, [Answer(prompt, name) for prompt in prompts for name in NAMES])
    after = engine.stats()
    for name, memory in memories.items():
        engine_layers = after[name]
        read = sum(len(prompt) + LENGTH - 1 for prompt in prompts)
        for layer, one in engine_layers.items():
            assert one.tokens - before[name][layer].tokens == read
        assert len(engine_layers) == len(memory.layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["olmoe", "gpt_oss", "qwen3_moe"])
def test_heads_and_first_tokens(name: str, zoo_tokenizer: Any) -> None:
    """A memory with a language-model head that spares first tokens says what it says alone."""
    model = family(name)
    memory = build_memory(model, zoo_tokenizer, make_texts(12), replace(BUILD, learning_rate=20.0))
    config = RoutingConfig(head=HeadConfig(keys="router", weight=0.5, k=4), spare_first_token=True)
    draw = torch.Generator().manual_seed(0)
    alone: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}
    while len(alone) < 4:
        prompt = torch.randint(3, 128, (5,), generator=draw).tolist()
        with attach(model, memory, config):
            ids, values, gap = say_alone(model, prompt)
        with suppress(AssertionError):
            assert gap > 0.01
            assert_no_near_ties(model, memory, torch.tensor([prompt + ids]), config)
            alone[tuple(prompt)] = ids, values
    engine = Engine(model, EngineConfig(), PROBES)
    try:
        assert engine.why_one_by_one is None
        engine.load("memory", memory, config)
        answers = [Answer(prompt, each) for prompt in alone for each in ("memory", None)]
        said = ask(engine, answers)
    finally:
        engine.stop()
    for (ids, values), tokens in zip(alone.values(), said[::2], strict=True):
        assert [token.id for token in tokens] == ids
        found = [token.logprob for token in tokens]
        assert found == pytest.approx(values, abs=1e-2)
    for prompt, tokens in zip(alone, said[1::2], strict=True):
        assert [token.logprob for token in tokens] == pytest.approx(
            say_alone(model, list(prompt))[1], abs=1e-2
        )


def test_a_model_that_fails_ends_everything() -> None:
    model = family("olmoe")
    engine = Engine(model, EngineConfig(at_once=1), PROBES)
    failed = threading.Event()
    engine.when_failed = failed.set

    def fail(*_: Any) -> None:
        raise RuntimeError("out of order")

    running, waiting = Answer([5], None), Answer([6], None)
    handle = model.register_forward_pre_hook(fail)
    with quiet_transformers():
        engine.submit([running.job, waiting.job])
        for answer in (running, waiting):
            while not isinstance(event := answer.events.get(timeout=60), Ended):
                pass
            assert "out of order" in str(event.error)
        assert failed.wait(timeout=60)
    handle.remove()
    with pytest.raises(StoppedError):
        engine.submit([Answer([5], None).job])
    engine.stop()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-olmoe"], indirect=True)
@pytest.mark.parametrize("shared", [False, True])
def test_what_one_memory_left_in_the_cache_is_no_other_s(
    model: PreTrainedModel,
    memories: dict[str, RoutingMemory],
    shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One long prompt for all, one after the other. With blocks shared this fails."""
    if shared:
        make = ContinuousBatchingConfig
        monkeypatch.setattr(
            batches,
            "ContinuousBatchingConfig",
            lambda **options: make(**{**options, "allow_block_sharing": True}),
        )
    ((prompt, said),) = find_prompts(model, memories, 1, (38, 44)).items()
    engine = Engine(model, EngineConfig(), PROBES)
    try:
        for name, memory in memories.items():
            engine.load(name, memory, memory.routing)
        values = {
            name: [token.logprob for token in ask(engine, [Answer(prompt, name)])[0]]
            for name in ("law", "medicine", None, "law")
        }
    finally:
        engine.stop()
    right = all(values[name] == pytest.approx(said[name][1], abs=1e-2) for name in NAMES)
    assert right == (not shared)


@pytest.mark.parametrize("model", ["tiny-olmoe"], indirect=True)
@pytest.mark.parametrize("engine", [EngineConfig(at_once=1, waiting=1)], indirect=True)
def test_a_queue_is_bounded_and_cancelled(engine: Engine) -> None:
    running, waiting, other = (Answer([5, 6], None, max_tokens=900) for _ in range(3))
    engine.submit([running.job])
    engine.submit([waiting.job])
    with pytest.raises(BusyError, match="1 answers are generated and 1 wait"):
        engine.submit([other.job])
    assert isinstance(running.events.get(timeout=60), Began)
    engine.cancel([running.job])
    assert isinstance(waiting.events.get(timeout=60), Began)
    assert isinstance(waiting.events.get(timeout=60), Token)
    engine.submit([other.job])
    engine.cancel([other.job, waiting.job, waiting.job])
    assert engine.counts() == (0, 0)
    assert other.events.empty()
    last = Answer([5, 6], None)
    assert len(ask(engine, [last])[0]) == LENGTH
    engine.close()
    with pytest.raises(StoppedError, match="takes no more"):
        engine.submit([Answer([5, 6], None).job])


@pytest.mark.parametrize("model", ["tiny-olmoe"], indirect=True)
def test_the_end_token_ends_an_answer(engine: Engine) -> None:
    ids = [token.id for token in ask(engine, [Answer([5, 6, 7], "law")])[0]]
    ended = ask(engine, [Answer([5, 6, 7], "law", ends=[ids[2]])])[0]
    assert [token.id for token in ended] == ids[: ids.index(ids[2]) + 1]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-olmoe"], indirect=True)
@pytest.mark.parametrize("engine", CONFIGS.values(), ids=CONFIGS, indirect=True)
def test_memories_come_and_go_while_answers_are_generated(
    engine: Engine, memories: dict[str, RoutingMemory], expected: Any
) -> None:
    prompt = next(iter(expected))
    ids = {name: expected[prompt][name][0] for name in NAMES}
    long = Answer(prompt, "medicine", max_tokens=60)
    engine.submit([long.job])
    assert isinstance(long.events.get(timeout=60), Began)
    engine.load("second", memories["law"], memories["law"].routing)
    assert [token.id for token in ask(engine, [Answer(prompt, "second")])[0]] == ids["law"]
    unloading = threading.Thread(target=engine.unload, args=["medicine"])
    again = Answer(prompt, "medicine", max_tokens=60)
    engine.submit([again.job])
    unloading.start()
    for answer in (long, again):  # unloading waits for both
        found = [token.id for token in answer.tokens()]
        assert len(found) == 60
        assert found[:LENGTH] == ids["medicine"]
    unloading.join(timeout=60)
    assert engine.memories == ["law", "second"]
    with pytest.raises(UnknownMemoryError, match="'medicine' is not loaded"):
        engine.submit([Answer(prompt, "medicine").job])
    with pytest.raises(UnknownMemoryError, match="'medicine' is not loaded"):
        engine.unload("medicine")
    engine.load("medicine", memories["medicine"], memories["medicine"].routing)
    assert [token.id for token in ask(engine, [Answer(prompt, "medicine")])[0]] == ids["medicine"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-olmoe"], indirect=True)
def test_a_memory_of_another_model_is_refused(
    engine: Engine, zoo_memory: RoutingMemory, expected: Any
) -> None:
    with pytest.raises(MemoryMismatchError, match="built for"):
        engine.load("other", zoo_memory, zoo_memory.routing)
    assert engine.memories == ["medicine", "law"]
    prompt = next(iter(expected))
    found = [token.id for token in ask(engine, [Answer(prompt, "law")])[0]]
    assert found == expected[prompt]["law"][0]


@pytest.mark.parametrize("name", ["jamba", "deepseek_v3", "gpt_oss", "mixtral"])
def test_what_cannot_be_batched_is_served_one_by_one(name: str) -> None:
    model = family(name)
    attention = model.config._attn_implementation
    engine = Engine(model, EngineConfig(), PROBES)
    try:
        assert (engine.why_one_by_one is None) == (name in ("gpt_oss", "mixtral"))
        prompt = [5, 9, 70]
        said = [token.id for token in ask(engine, [Answer(prompt, None)])[0]]
    finally:
        engine.stop()
    assert model.config._attn_implementation == attention
    assert said == say_alone(model, prompt)[0]
