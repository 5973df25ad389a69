"""The process of a generated program: runs the program, then its tests, and reports how they ended.

sandbox.py passes this file's text to Python, with the plan as standard input. It imports nothing of
ours, because only the standard library is there.
"""

import json
import os
import resource
import sys
import types

NONCE = 32  # bytes at the beginning of the plan


def main() -> None:
    """Run what the plan says; its first bytes, sent back after the last test, mean a pass."""
    plan, report, null = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    asked = json.loads(os.pread(plan, os.fstat(plan).st_size, NONCE))
    # The program may replace these names in their modules.
    read, write, leave, process = os.pread, os.write, os._exit, os.getpid
    first = process()
    for name, value in asked["limits"].items():
        limit(getattr(resource, name), value)
    write(report, b"ready\n")
    try:
        run(asked["program"], asked["tests"])
        verdict = read(plan, NONCE, 0)
    except BaseException as error:
        verdict = describe(error)
    if process() == first:  # not one that the program has started
        write(report, verdict + b"\n")
    leave(0)  # not sys.exit: the program may have left threads, or functions to call at exit


def limit(kind: int, value: int) -> None:
    """Set a limit, or keep a lower one."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def run(program: str, tests: str) -> None:
    """Run the program as an imported module, whose `__main__` block is left out; then the tests."""
    module = types.ModuleType("program")
    sys.modules["program"] = module  # where pickle and dataclasses look for its classes
    execute = exec  # which the program may replace
    for code in [compile(text, "<program>", "exec") for text in (program, tests)]:
        execute(code, module.__dict__)


def describe(error: BaseException) -> bytes:
    """Return the error in a line."""
    if isinstance(error, SystemExit):
        return b"exited early"
    name = type(error).__name__
    try:
        text = f"{name}: {error}" if str(error) else name
    except BaseException:  # the program may define the __str__ of its errors
        text = name
    return " ".join(text[:500].split()).encode("utf-8", "backslashreplace")


if __name__ == "__main__":
    main()
