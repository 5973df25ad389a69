"""The official client: streams, whole answers, log-probabilities, errors, and many at once."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI

from helpers.served import Served
from knn_moe import RoutingMemory

MODELS = ("base", "medicine", "law")
MESSAGES: Any = [{"role": "user", "content": "A fever is"}]


def complete(server: Served, **options: Any) -> Any:
    usual = {"model": "law", "prompt": "A fever is", "max_tokens": 8, "temperature": 0}
    return server.client.completions.create(**{**usual, **options})


def text_of(server: Served, **options: Any) -> str:
    return str(complete(server, **options).choices[0].text)


def test_models(server: Served) -> None:
    models = {model.id: model for model in server.client.models.list()}
    assert list(models) == list(MODELS)
    assert [models[name].parent for name in MODELS] == [None, "base", "base"]
    assert server.client.models.retrieve("law").id == "law"
    with pytest.raises(openai.NotFoundError, match="Did you mean 'law'"):
        server.client.models.retrieve("lew")


def test_ids_of_tokens_are_told_where_they_are_wanted(server: Served, tiny_tokenizer: Any) -> None:
    wanted = {"return_token_ids": True}
    whole = complete(server, model="law", n=2, extra_body=wanted)
    prompt = tiny_tokenizer(whole_prompt := "A fever is")["input_ids"]
    for choice in whole.choices:
        told = choice.model_dump()
        assert told["prompt_token_ids"] == prompt, whole_prompt
        assert tiny_tokenizer.decode(told["token_ids"]) == choice.text
    stream = list(complete(server, model="law", stream=True, extra_body=wanted))
    first, *others = (chunk.choices[0].model_dump() for chunk in stream)
    assert (first["prompt_token_ids"], first["token_ids"]) == (prompt, [])
    ids = [id for one in others for id in one["token_ids"]]
    assert ids == whole.choices[0].model_dump()["token_ids"]
    assert "token_ids" not in complete(server, model="law").choices[0].model_dump()


def test_ids_of_tokens_in_a_chat(server: Served, tiny_tokenizer: Any) -> None:
    asked: dict[str, Any] = {
        "model": "law",
        "messages": [{"role": "user", "content": "A fever is"}],
        "max_tokens": 4,
        "temperature": 0,
        "extra_body": {"return_token_ids": True},
    }
    prompt = tiny_tokenizer("A fever is")["input_ids"]
    whole = server.client.chat.completions.create(**asked)
    told = whole.model_dump()
    assert told["prompt_token_ids"] == prompt
    ids = told["choices"][0]["token_ids"]
    assert tiny_tokenizer.decode(ids) == whole.choices[0].message.content
    first, *others = server.client.chat.completions.create(**asked, stream=True)
    assert first.model_dump()["prompt_token_ids"] == prompt
    chunks = (chunk.choices[0].model_dump() for chunk in others)
    assert [id for one in chunks for id in one["token_ids"]] == ids


@pytest.mark.parametrize("model", MODELS)
def test_a_stream_is_the_whole_answer(server: Served, model: str) -> None:
    whole = complete(server, model=model, logprobs=2)
    stream = complete(
        server, model=model, logprobs=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert (last.choices, last.usage) == ([], whole.usage)
    assert (whole.usage.completion_tokens, whole.usage.prompt_tokens) == (8, 4)
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    tokens = [token for each in told for token in each.tokens]
    values = [value for each in told for value in each.token_logprobs]
    assert tokens == whole.choices[0].logprobs.tokens
    assert "".join(tokens) == whole.choices[0].text
    assert values == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-4)
    offsets = [offset for each in told for offset in each.text_offset]
    assert offsets == [sum(map(len, tokens[:place])) for place in range(len(tokens))]


def test_a_chat(server: Served) -> None:
    client = server.client.chat.completions
    asked: Any = {"model": "medicine", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    whole = client.create(**asked, logprobs=True, top_logprobs=3)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == text_of(server, model="medicine", max_tokens=6)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for told in choice.logprobs.content:
        assert told.token == told.top_logprobs[0].token  # greedy
        assert bytes(told.bytes or []).decode() == told.token
        assert len(told.top_logprobs) == 3
    chunks = list(client.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)
    # Without a number, an answer has as much room as the context.
    long = client.create(model="base", messages=MESSAGES, temperature=0, max_completion_tokens=3)
    assert long.usage is not None
    assert long.usage.completion_tokens == 3


def test_log_probabilities_are_the_model_s(
    server: Served, tiny_tokenizer: Any, memories: dict[str, RoutingMemory]
) -> None:
    """They are those of a whole pass over prompt and answer."""
    whole = complete(server, model="base", logprobs=20, temperature=1.2, seed=4)
    told = whole.choices[0].logprobs
    prompt = tiny_tokenizer("A fever is")["input_ids"]
    ids = tiny_tokenizer.convert_tokens_to_ids(
        [tiny_tokenizer.tokenize(token)[0] for token in told.tokens]
    )
    model: Any = server.service.engine._model
    routing = server.service.engine.routing
    with torch.no_grad(), routing.using(None):
        logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0]
    logprobs = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
    expected = logprobs.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
    assert told.token_logprobs == pytest.approx(expected.tolist(), abs=1e-3)
    assert sum(told.token_logprobs) == pytest.approx(float(expected.sum()), abs=1e-2)
    for place, top in enumerate(told.top_logprobs):
        shares = sum(math.exp(value) for value in top.values())
        likeliest = float(logprobs[place].topk(20).values.exp().sum())
        assert shares == pytest.approx(likeliest, abs=1e-3) or len(top) < 20  # equal texts


def test_seeds_reproduce(server: Served) -> None:
    options = {"temperature": 1.5, "max_tokens": 12}
    first = text_of(server, seed=7, **options)
    assert text_of(server, seed=7, **options) == first
    assert text_of(server, seed=8, **options) != first
    assert len({text_of(server, **options) for _ in range(3)}) > 1


def test_several_answers(server: Served) -> None:
    options: Any = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
    single = text_of(server, **options)
    several = complete(server, n=3, **options)
    texts = [choice.text for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert texts[0] == single
    assert len(set(texts)) == 3
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (4, 36)
    parts: dict[int, str] = {}
    for chunk in complete(server, n=3, stream=True, **options):
        choice = chunk.choices[0]
        parts[choice.index] = parts.get(choice.index, "") + choice.text
    assert [parts[index] for index in range(3)] == texts
    prompts = complete(server, prompt=["A fever is", "It"], n=2)
    assert [choice.index for choice in prompts.choices] == [0, 1, 2, 3]
    alone = text_of(server), text_of(server, prompt="It")
    assert [choice.text for choice in prompts.choices] == [alone[0]] * 2 + [alone[1]] * 2
    ids = complete(server, prompt=[[5, 6, 7], [8]])
    assert ids.choices[1].text == text_of(server, prompt=[8])


def test_stop_strings(server: Served) -> None:
    text = text_of(server, max_tokens=16)
    middle = len(text) // 2
    stop = text[middle - 2 : middle + 3]  # inside and over tokens
    expected = text[: text.find(stop)]
    stopped = complete(server, max_tokens=16, stop=[stop, "never said"], logprobs=0)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (expected, "stop")
    assert "".join(stopped.choices[0].logprobs.tokens).startswith(expected)
    assert stopped.usage.completion_tokens <= 16
    chunks = list(complete(server, max_tokens=16, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_errors_are_openai_s(server: Served) -> None:
    client = server.client
    with pytest.raises(openai.NotFoundError) as missing:
        complete(server, model="laws")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        complete(server, prompt="a " * 1500)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="Ask for at most 1,021"):
        complete(server, max_tokens=1022)
    with pytest.raises(openai.BadRequestError, match="does not support 'logit_bias'"):
        complete(server, logit_bias={"5": 1})
    with pytest.raises(openai.BadRequestError, match="no tokens"):
        complete(server, prompt="")
    with pytest.raises(openai.BadRequestError, match="Token ids are from 0"):
        complete(server, prompt=[1, 10**6])
    with pytest.raises(openai.NotFoundError, match=r"no POST /v1/embeddings"):
        client.embeddings.create(model="law", input="Hi")


def test_a_hundred_at_once(server: Served) -> None:
    alone = {model: text_of(server, model=model) for model in MODELS}
    assert len(set(alone.values())) == 3

    async def ask(client: AsyncOpenAI, number: int) -> bool:
        model = MODELS[number % 3]
        options: Any = {"model": model, "prompt": "A fever is", "max_tokens": 8, "temperature": 0}
        if number % 2:
            return (await client.completions.create(**options)).choices[0].text == alone[model]
        text = ""
        async for chunk in await client.completions.create(**options, stream=True):
            text += chunk.choices[0].text
        return text == alone[model]

    async def ask_all() -> list[bool]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(100)))

    assert all(asyncio.run(ask_all()))
