"""`knn-moe generate`: prompts from standard input, text as it comes, and how it ends early."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result

from helpers.commands import assert_refused
from knn_moe.cli.common import encode_prompt
from knn_moe.cli.main import main
from knn_moe.errors import ConfigError


def generate(*arguments: str, given: bytes = b"") -> Result:
    return CliRunner().invoke(main, ["generate", "tiny-olmoe", *arguments], input=given)


@pytest.mark.parametrize("arguments", [(), ("-",)])
@pytest.mark.parametrize("given", [b"A fever is\n", b"\xef\xbb\xbfA fever is\r\n", b"A fever is"])
def test_the_prompt_is_read_from_standard_input(arguments: tuple[str, ...], given: bytes) -> None:
    result = generate(*arguments, "--json", "--max-new-tokens", "2", given=given)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["prompt"] == "A fever is"


def test_what_is_no_prompt_is_refused() -> None:
    assert_refused(generate(given=b"A fever \xff"), "not UTF-8: byte 8 is 0xff")
    assert_refused(generate(given=b""), "The prompt has no tokens")
    assert_refused(generate("A fever \udcff"), "The prompt is not UTF-8")
    refused = generate("fever " * 1030)
    assert_refused(refused, "tokens, and the model reads at most 1,024. Shorten the prompt")


def test_a_prompt_goes_through_the_chat_template(tiny_tokenizer: Any) -> None:
    talking = copy.deepcopy(tiny_tokenizer)
    talking.chat_template = "<user>{{ messages[0].content }}</user>"
    ids = encode_prompt(talking, "A fever", True, "cpu")["input_ids"]
    assert talking.decode(ids[0]) == "<user>A fever</user>"
    talking.chat_template = "{{ raise_exception('No fever, please') }}"
    with pytest.raises(ConfigError, match="template refuses this: No fever, please"):
        encode_prompt(talking, "A fever", True, "cpu")


def test_a_text_that_the_context_cuts_short_is_announced() -> None:
    prompt = " a" * 1021
    result = generate(prompt, "--max-new-tokens", "9")
    assert result.exit_code == 0, result.output
    assert "has room for" in " ".join(result.stderr.split())
    assert "has room for" not in generate(prompt, "--max-new-tokens", "1").stderr


@contextmanager
def generating() -> Iterator[subprocess.Popen[bytes]]:
    """Start a long text in a process of its own, and wait for its first character."""
    arguments = ("generate", "tiny-olmoe", "A fever is", "--max-new-tokens", "1000")
    command = [sys.executable, "-m", "knn_moe.cli.main", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, bufsize=0) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.read(1)
            assert process.poll() is None
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_ctrl_c_ends_a_text_quietly() -> None:
    with generating() as process:
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output.endswith(b"\n")
    assert b"Traceback" not in errors
    assert b"Abort" not in errors


@pytest.mark.slow
def test_a_reader_that_leaves_ends_a_text_quietly() -> None:
    with generating() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=30) == 1
    assert b"Traceback" not in errors
    assert b"Error" not in errors
