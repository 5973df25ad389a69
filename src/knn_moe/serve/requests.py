"""What a request asks: OpenAI's fields, each parsed and checked.

A field that would change the answer and is not supported is refused by name, never passed over.
Knows JSON values; nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeAlias

from knn_moe.serve.refused import RefusedError
from knn_moe.serve.sampling import Sampling
from knn_moe.support.characters import half_of_character

Message: TypeAlias = dict[str, str]
Prompt: TypeAlias = str | list[int] | list[Message]  # a text, token ids, or a conversation

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MOST_TOP: Final = 20  # alternatives beside a token
_MOST_STOPS: Final = 16
_LONGEST_STOP: Final = 1000  # characters
_MOST_CHOICES: Final = 128
_MOST_TOKENS: Final = 1 << 31
_COMMON: Final = (
    "model", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream",
    "return_token_ids",
)  # fmt: skip
_OWN: Final = {
    True: (*_COMMON, "stream_options", "messages", "max_completion_tokens", "top_logprobs"),
    False: (*_COMMON, "stream_options", "prompt"),
}
_EXPLANATION: Final = ("model", "prompt_token_ids", "token_ids", "token")
# Fields that do not change an answer.
_IGNORED: Final = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "service_tier",
    "parallel_tool_calls",
}
# Fields that would, and the values with which they do not.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for."""

    model: str
    prompts: tuple[Prompt, ...]
    chat: bool
    n: int
    max_tokens: int | None  # None: the request does not say
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    token_ids: bool  # whether the ids of tokens are told, as vLLM does

    @property
    def choices(self) -> int:
        """The number of answers."""
        return self.n * len(self.prompts)


def parse_request(body: object, *, chat: bool) -> Asked:
    """Return what the JSON of a request asks.

    Raises:
        RefusedError: A field is missing, unknown, unsupported or wrong.
    """
    if not isinstance(body, dict):
        raise RefusedError("The body of a request is a JSON object.")
    _check_names(body, chat)
    fields = _Fields(body)
    prompts = (_messages(body.get("messages")),) if chat else _prompts(body.get("prompt"))
    most = fields.whole("max_tokens", 1, _MOST_TOKENS)
    if chat:
        most = fields.whole("max_completion_tokens", 1, _MOST_TOKENS) or most
    stream = fields.flag("stream")
    asked = Asked(
        model=fields.text("model"),
        prompts=prompts,
        chat=chat,
        n=fields.whole("n", 1, _MOST_CHOICES) or 1,
        max_tokens=most,
        sampling=Sampling(
            temperature=fields.number("temperature", 0.0, 2.0, 1.0),
            top_p=fields.number("top_p", 0.0, 1.0, 1.0),
            seed=fields.whole("seed", -(1 << 63), (1 << 63) - 1),
            logprobs=_logprobs(fields, chat),
        ),
        stops=_stops(body.get("stop")),
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream),
        token_ids=fields.flag("return_token_ids"),
    )
    if asked.choices > _MOST_CHOICES:
        raise RefusedError(
            f"The request asks for {asked.choices} answers, and {_MOST_CHOICES} is the most.",
            param="n" if asked.n > 1 else "prompt",
        )
    return asked


@dataclass(frozen=True, kw_only=True)
class AskedExplanation:
    """What a request for an explanation asks for."""

    model: str
    prompt: list[int]
    answer: list[int]
    token: int | None  # the place in the answer that is told in full; None: all, in short


def parse_explanation(body: object) -> AskedExplanation:
    """Return what the JSON of a request for an explanation asks.

    Raises:
        RefusedError: A field is missing, unknown or wrong.
    """
    if not isinstance(body, dict):
        raise RefusedError("The body of a request is a JSON object.")
    for name in body:
        if name not in _EXPLANATION:
            raise _unknown_field(name, _EXPLANATION)
    fields = _Fields(body)
    answer = fields.ids("token_ids")
    return AskedExplanation(
        model=fields.text("model"),
        prompt=fields.ids("prompt_token_ids"),
        answer=answer,
        token=fields.whole("token", 0, len(answer)),
    )


def _check_names(body: Mapping[str, Any], chat: bool) -> None:
    known = {*_OWN[chat], "logprobs"}
    for name, value in body.items():
        if name in known or name in _IGNORED or value is None:
            continue
        if name in _NEUTRAL:
            if not any(value == neutral for neutral in _NEUTRAL[name]):
                raise RefusedError(
                    f"This server does not support {name!r}. Leave it out.", param=name
                )
            continue
        raise _unknown_field(name, known)


def _unknown_field(name: str, known: Collection[str]) -> RefusedError:
    close = get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f" Did you mean {close[0]!r}?" if close else " Leave it out."
    shown = name if len(name) <= 60 else f"{name[:60]}…"
    return RefusedError(f"Unknown field {shown!r}.{hint}", param=shown)


class _Fields:
    """Reads the fields of a request by their kinds. None is as if a field were not there."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def text(self, name: str) -> str:
        value = self._body.get(name)
        if not isinstance(value, str) or not value:
            raise RefusedError(f"{name!r} must be a text.", param=name)
        return _whole_text(value, name)

    def ids(self, name: str) -> list[int]:
        value = self._body.get(name)
        if not isinstance(value, list) or not _are_ids(value):
            raise RefusedError(f"{name!r} must be a list of token ids.", param=name)
        return value

    def flag(self, name: str) -> bool:
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            raise RefusedError(f"{name!r} must be true or false.", param=name)
        return bool(value)

    def whole(self, name: str, least: int, most: int) -> int | None:
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise RefusedError(
                f"{name!r} must be a whole number from {least} to {most}.", param=name
            )
        return value

    def number(self, name: str, least: float, most: float, usual: float) -> float:
        value = self._body.get(name)
        if value is None:
            return usual
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not least <= value <= most:  # as with NaN
            raise RefusedError(f"{name!r} must be a number from {least:g} to {most:g}.", param=name)
        return float(value)


def _logprobs(fields: _Fields, chat: bool) -> int | None:
    if not chat:
        return fields.whole("logprobs", 0, _MOST_TOP)
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, _MOST_TOP)
    if top and not wanted:
        raise RefusedError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return (top or 0) if wanted else None


def _stops(value: object) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    good = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    if not good or not isinstance(texts, list):
        raise RefusedError("'stop' must be a text or a list of texts, none empty.", param="stop")
    if len(texts) > _MOST_STOPS or any(len(text) > _LONGEST_STOP for text in texts):
        raise RefusedError(
            f"'stop' takes at most {_MOST_STOPS} texts of {_LONGEST_STOP} characters.", param="stop"
        )
    return tuple(_whole_text(text, "stop") for text in texts)


def _include_usage(value: object, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict):
        raise RefusedError("'stream_options' must be a JSON object.", param="stream_options")
    if not stream:
        raise RefusedError("'stream_options' needs 'stream': true.", param="stream_options")
    for name in value:
        if name not in ("include_usage", "include_obfuscation"):
            raise RefusedError("Unknown field in 'stream_options'.", param="stream_options")
    return _Fields(value).flag("include_usage")


def _prompts(value: object) -> tuple[Prompt, ...]:
    """Return the prompts of a completion: a text or token ids, or a list of either."""
    if isinstance(value, str):
        return (_whole_text(value, "prompt"),)
    if _are_ids(value):
        return (value,)  # type: ignore[return-value]
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return tuple(_whole_text(one, "prompt") for one in value)
    if isinstance(value, list) and value and all(_are_ids(one) for one in value):
        return tuple(value)
    raise RefusedError(
        "'prompt' must be a text or a list of token ids, or a list of texts or of such lists.",
        param="prompt",
    )


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    )


def _messages(value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise RefusedError("'messages' must be a list of at least one message.", param="messages")
    return [_message(one, place) for place, one in enumerate(value)]


def _message(value: object, place: int) -> Message:
    where = f"messages[{place}]"
    if not isinstance(value, dict):
        raise RefusedError(f"{where} must be a JSON object.", param=where)
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        raise RefusedError(f"The role of {where} must be one of {', '.join(_ROLES)}.", param=where)
    unsupported = [name for name in ("tool_calls", "function_call", "audio") if value.get(name)]
    if unsupported:
        raise RefusedError(
            f"This server does not support {unsupported[0]!r} in {where}.", param=where
        )
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise RefusedError(
                f"This server reads text only, and {where} has other parts.", param=where
            )
        content = "".join(texts)
    if not isinstance(content, str):
        raise RefusedError(f"The content of {where} must be a text.", param=where)
    return {"role": role, "content": _whole_text(content, where)}


def _whole_text(text: str, name: str) -> str:
    if half_of_character(text) is not None:
        raise RefusedError(
            f"{name!r} holds half of a character, which is no Unicode text.", param=name
        )
    return text
