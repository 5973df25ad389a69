"""`knn-moe chat`, as a script and in a terminal: replies, commands, and what Ctrl-C stops."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from helpers.commands import assert_refused
from helpers.tiny import trained, words
from knn_moe import BuildConfig, attach, build_memory, load_model
from knn_moe.cli.main import main

MEDICINE = "A fever is a body temperature above the normal range, often due to an infection."
LAW = "A contract is an agreement that the parties can enforce before a court of law."
TEMPLATE = (
    "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# A process in the background may have inherited that Ctrl-C is ignored.
_RUN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from knn_moe.cli.main import main; main()"
)


@pytest.fixture(scope="module")
def memories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two memories of tiny-olmoe."""
    home = tmp_path_factory.mktemp("memories")
    model = trained("tiny-olmoe")
    config = BuildConfig(learning_rate=3.0, steps=3)
    for name, text in (("medicine", MEDICINE), ("law", LAW)):
        build_memory(model, words(), [text], config, folder=home / name)
    return home


def chat(*arguments: object, lines: list[str], model: object = "tiny-olmoe") -> Result:
    """Run a session in this process; it must end well."""
    given = "".join(f"{line}\n" for line in lines)
    command = ["chat", str(model), "--max-new-tokens", "8", *map(str, arguments)]
    result = CliRunner().invoke(main, command, input=given)
    assert result.exit_code == 0, result.output
    return result


def both(memories: Path) -> tuple[object, ...]:
    return ("--memory", memories / "medicine", "--memory", memories / "law")


def complete(text: str, memory: Path | None = None, length: int = 8) -> str:
    """What transformers gives for a text."""
    model, tokenizer = load_model("tiny-olmoe")
    inputs = tokenizer(text, return_tensors="pt")

    def generate() -> str:
        output = model.generate(**inputs, do_sample=False, max_new_tokens=length)
        new = output[0, inputs["input_ids"].shape[1] :]
        reply: str = tokenizer.decode(new, skip_special_tokens=True)
        return reply

    if memory is None:
        return generate()
    with attach(model, memory):
        return generate()


def test_replies_are_those_of_the_memory_in_use(memories: Path) -> None:
    lines = ["A fever is", "/reset", "/memory law", "A fever is", "/reset", "/off", "A fever is"]
    result = chat(*both(memories), lines=lines)
    replies = [
        complete("A fever is", memories / "medicine"),
        complete("A fever is", memories / "law"),
        complete("A fever is"),
    ]
    assert result.stdout == "".join(f"{reply}\n" for reply in replies)
    assert replies[0] != replies[2]
    assert "with the memory medicine; /memory chooses among medicine, law" in result.stderr
    assert result.stderr.count("no chat template") == 1


def test_the_conversation_goes_on(memories: Path) -> None:
    result = chat(lines=["A fever is", "", "It"])
    first = complete("A fever is")
    second = complete(f"A fever is{first}\nIt")
    assert result.stdout == f"{first}\n{second}\n"
    assert "with no memory" in result.stderr


def test_the_chat_template_is_used(tmp_path: Path) -> None:
    model, tokenizer = load_model("tiny-qwen3")
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    build_memory(model, tokenizer, [MEDICINE], folder=tmp_path / "memory")
    result = chat("--memory", tmp_path / "memory", lines=["Hi"], model=tmp_path / "model")
    assert "no chat template" not in result.stderr
    inputs = tokenizer("user: Hi\nassistant:", return_tensors="pt")
    with attach(model, tmp_path / "memory"):
        output = model.generate(**inputs, do_sample=False, max_new_tokens=8)
    reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert result.stdout == f"{reply}\n"


def test_comparing_shows_both_and_keeps_the_memory_s(memories: Path) -> None:
    medicine = memories / "medicine"
    result = chat("--memory", medicine, lines=["/compare", "A fever is", "/compare", "It"])
    alone, reply = complete("A fever is"), complete("A fever is", medicine)
    second = complete(f"A fever is{reply}\nIt", medicine)
    assert result.stdout == f"model alone: {alone}\nmedicine: {reply}\n{second}\n"
    assert "Replies are also shown by the model alone." in result.stderr
    assert "Replies are shown once." in result.stderr


def test_the_last_reply_is_explained(memories: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    lines = ["/explain", "A fever is", "/explain", f"/explain {page}", "/off", "/explain"]
    result = chat("--memory", memories / "medicine", lines=[*lines, "It", "/explain"])
    assert "There is no reply to explain yet." in result.stderr
    assert "The last reply was by the model alone: there is nothing to explain." in result.stderr
    tables = result.stdout.count("recalled\n")
    assert tables == 2  # also after /off, the reply before was the memory's
    assert re.search(r"^\| is\| .*→.*\[ is\] a", result.stdout, re.MULTILINE)
    assert "the memory medicine" in page.read_text(encoding="utf8")
    assert f"Wrote {page}." in " ".join(result.stderr.split())


def test_commands_that_cannot_be_done_say_why(memories: Path, tmp_path: Path) -> None:
    lines = ["/hlep", "/memory arts", "/memory", "/help", "A fever is", f"/explain {tmp_path}"]
    lines += [f"/explain {tmp_path}/no/page.html", "/quit", "A contract is"]
    result = chat(*both(memories), lines=lines)
    said = " ".join(result.stderr.split())
    assert "Unknown command '/hlep'. Did you mean '/help'? Available: /memory, /off," in said
    assert "Unknown memory 'arts'. Available: medicine, law." in said
    assert "is a folder. Name a file" in said
    assert "There is no folder" in said
    shown = result.stdout.splitlines()
    assert shown[:2] == ["medicine (in use)", "law"]
    assert shown[2].startswith("/memory [NAME]")
    assert result.stdout.endswith(f"\n{complete('A fever is', memories / 'medicine')}\n")
    for command in ("/memory", "/memory law", "/compare"):
        assert "There is no memory. Name one at the start" in chat(lines=[command]).stderr


def test_slashes_can_be_said() -> None:
    assert chat(lines=["//usr"]).stdout == f"{complete('/usr')}\n"


def test_a_conversation_that_is_too_long() -> None:
    long = " a" * 700
    result = chat(lines=[f"start{long}", f"next{long}", " a" * 1100, "end"])
    said = " ".join(result.stderr.split())
    assert "longer than the model's context: the oldest turn is dropped." in said
    assert "The message has 1,100 tokens, and the model reads at most 1,024." in said
    assert len(result.stdout.splitlines()) >= 3


def test_what_cannot_begin(memories: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert_refused(run(main, ["chat", "tiny-olmo"]), "Did you mean 'tiny-olmoe'?")
    refused = run(main, ["chat", "tiny-olmoe", "--memory", str(tmp_path)])
    assert_refused(refused, "is not a memory")
    other = run(main, ["chat", "tiny-qwen3", "--memory", str(memories / "law")])
    assert_refused(other, "This memory was built for")
    assert_refused(run(main, ["chat", "tiny-olmoe"], input=b"\xff\n"), "Line 1 of standard input")


def test_memories_of_one_name_are_told_apart(memories: Path, tmp_path: Path) -> None:
    (tmp_path / "law").symlink_to(memories / "law")
    places = (str(memories / "law"), str(tmp_path / "law"))
    result = chat("--memory", places[0], "--memory", places[1], lines=["/memory"])
    assert result.stdout.splitlines() == [f"{places[0]} (in use)", places[1]]


@pytest.mark.slow
def test_a_script_in_a_process_of_its_own(memories: Path) -> None:
    command = [sys.executable, "-c", _RUN, "chat", "tiny-olmoe", "--max-new-tokens", "8"]
    arguments = map(str, both(memories))
    given = "\ufeffA fever is\r\n/quit\r\n".encode()
    done = subprocess.run([*command, *arguments], input=given, capture_output=True, check=True)
    assert done.stdout.decode() == complete("A fever is", memories / "medicine") + "\n"


class Terminal:
    """A session in a terminal, as a person sees it and types into it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = ""

    def expect(self, text: str, *, after: str = "") -> str:
        """Wait for `text`, typing `after` each second, and return what was shown before it."""
        for _ in range(60):
            self.type(after)
            self._read(text)
            if text in self._unread:
                before, _, self._unread = self._unread.partition(text)
                return before
        raise AssertionError(f"There is no {text!r} in {self._unread!r}.")

    def _read(self, text: str) -> None:
        """Read until there is `text`, or nothing for a second."""
        while text not in self._unread and select.select([self._descriptor], [], [], 1)[0]:
            self._unread += os.read(self._descriptor, 4096).decode("utf8", "replace")

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())


@contextmanager
def terminal(columns: int, *arguments: object) -> Iterator[Terminal]:
    """Start a session in a terminal. It must end well."""
    command = [sys.executable, "-c", _RUN, "chat", "tiny-olmoe", *map(str, arguments)]
    size = {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm", "NO_COLOR": "1"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | size,
        preexec_fn=lambda: os.login_tty(theirs),
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(ours)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            os.close(ours)


@pytest.mark.slow
def test_in_a_terminal(memories: Path) -> None:
    with terminal(120, "--memory", memories / "medicine", "--max-new-tokens", 200) as shown:
        shown.expect("medicine> ")
        shown.type("A fever is\n")
        shown.expect("A fever is\r\n")
        shown.expect(" ")
        shown.type("\x03")  # while the reply comes
        begun = shown.expect("Stopped.")
        assert "Traceback" not in begun
        shown.expect("medicine> ")
        shown.type("/explain\n")  # as far as the reply came
        shown.expect("recalled\r\n")
        shown.expect("medicine> ")
        shown.type("/compare\n")
        shown.expect("medicine> ")
        shown.type("It\n")
        shown.expect("model alone")  # the first picture of both columns
        assert "medicine" in shown.expect("\n")
        shown.expect("medicine> ")
        shown.type("/off\n")
        shown.expect("alone> ")
        shown.type("\x1b[A\n")  # the line before, from readline's history
        shown.expect("Replies are by the model alone.")
        # Between showing its prompt and waiting for a key, readline does not notice Ctrl-C.
        shown.expect("/quit or Ctrl-D ends the session.", after="\x03")
        shown.expect("alone> ")
        shown.type("\x04")


@pytest.mark.slow
def test_replies_are_one_under_the_other_where_the_terminal_is_narrow(memories: Path) -> None:
    with terminal(60, "--memory", memories / "law", "--max-new-tokens", 6) as shown:
        shown.expect("law> ")
        shown.type("/compare\nA contract is\n/quit\n")
        shown.expect("model alone: ")
        assert shown.expect("law: ").split() == complete("A contract is", length=6).split()
