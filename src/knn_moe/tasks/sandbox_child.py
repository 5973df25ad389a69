"""The part of the sandbox that runs in the program's process: confine, run, report.

Functions named `_child…` and `_guard…` are sent there as source text. They may only use the names
of this file that `CHILD` and `GUARDS` contain.
"""

from __future__ import annotations

import builtins
import ctypes
import inspect
import itertools
import json
import os
import resource
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any, Final

_MOST_FILES: Final = 100  # a limit bounds one file; this bounds what all of them hold

# Audit events, by how their names start: sockets, processes, memory, other frames, links.
_CLOSED: Final = """
    socket. ctypes. subprocess. syslog. pty. resource. gc.get_ os.exec os.posix_spawn os.spawn
    os.fork os.kill os.system os.startfile signal.pthread_kill sys._current sys.settrace
    sys.setprofile sys.addaudithook code.__new__ os.link os.symlink
"""
# Modules that open files, start processes or reach memory without an audit event.
_IMPORTS: Final = """
    ctypes _ctypes _sqlite3 _dbm _gdbm readline _posixshmem _multiprocessing _testcapi
    _testinternalcapi _xxsubinterpreters _interpreters
"""
# Audit events that change what their first path names.
_CHANGES: Final = """
    os.remove os.rename os.rmdir os.mkdir os.chmod os.chown os.truncate os.utime os.chflags
    os.chroot os.setxattr os.removexattr os.listxattr os.getxattr
"""
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _child() -> None:
    """Confine this process, run the program, and report how it ended."""
    with open(0, "rb", closefd=False) as stream:
        plan = json.load(stream)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    program, report = plan["program"], plan["report"]
    _child_limit(plan)
    readable = _child_drop_user(plan["user"])
    with suppress(OSError, AttributeError):  # a system without these calls
        _child_ask_kernel(plan, readable)
    for name in [name for name in sys.modules if name.lstrip("_").startswith("ctypes")]:
        del sys.modules[name]
    del sys.modules["__main__"], globals()["ctypes"]
    _child_set_guards(plan, readable)
    plan.clear()  # the program can look at this frame
    try:
        _child_run(program)
    except BaseException as error:
        os.write(report, _child_describe(error))
    # Not sys.exit: the program may have left functions to call at exit.
    os._exit(0)


def _child_limit(plan: dict[str, Any]) -> None:
    limits = {
        "RLIMIT_CPU": plan["seconds"],
        "RLIMIT_AS": plan["memory"],
        "RLIMIT_FSIZE": plan["file"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }
    for name, value in limits.items():
        with suppress(AttributeError, ValueError, OSError):
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            # The signal of the soft limit names the reason; that of the hard one is a plain kill.
            top = value + 1 if name == "RLIMIT_CPU" and value != hard else value
            resource.setrlimit(kind, (value, top))


def _child_drop_user(user: int | None) -> list[str]:
    """Become `user` if there is one, and return the folders of the standard library."""
    library = [path for path in sys.path if os.access(path, os.X_OK)]
    if user is None:
        return library
    # The library may be where `user` has no access, such as root's home: keep its folders open.
    flags = os.O_PATH | os.O_DIRECTORY
    opened = {path: f"/proc/self/fd/{os.open(path, flags)}" for path in library}
    with suppress(OSError):
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    sys.path[:] = opened.values()
    for module in list(sys.modules.values()):
        for path in library:
            if any(part.startswith(path) for part in getattr(module, "__path__", ())):
                module.__path__ = [part.replace(path, opened[path]) for part in module.__path__]
    return [*library, *opened.values()]


def _child_ask_kernel(plan: dict[str, Any], readable: list[str]) -> None:
    """Give up new privileges, then files outside (Landlock), then system calls (seccomp)."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *values: int | bytes) -> int:
        wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
        return int(getattr(libc, function)(*wide))

    if sys.platform != "linux" or call("prctl", 38, 1, 0, 0, 0):
        return
    _child_landlock(lambda *values: call("syscall", *values), plan["folder"], readable)
    steps = bytes.fromhex(plan["filter"])
    if steps:
        held = ctypes.create_string_buffer(steps)
        call("prctl", 22, 2, struct.pack("HxxxxxxQ", len(steps) // 8, ctypes.addressof(held)), 0, 0)


def _child_landlock(call: Callable[..., int], folder: str, readable: list[str]) -> None:
    """Refuse all files but those of the folder, the library and the system's libraries."""
    create_ruleset, add_rule, restrict_self = 444, 445, 446
    version = call(create_ruleset, 0, 0, 1)
    if version < 1:
        return
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    # All rights to files, both to TCP, and signals and abstract sockets beyond this process.
    rules = call(create_ruleset, struct.pack("QQQ", everything, 3, 3)[:size], size, 0)
    # Not even in its folder may it execute (0) or make devices, sockets, pipes or links (6, 9-12).
    rights = {folder: everything & ~0b1_1110_0100_0001, os.devnull: 0b110}
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"]
    rights |= dict.fromkeys([*readable, *system, "/dev/urandom", "/dev/random"], 0b1100)
    for path, right in rights.items():
        with suppress(OSError):
            place = os.open(path, os.O_PATH)
            for part in (right, right & 0b110):  # a file accepts only the rights of files
                call(add_rule, rules, 1, struct.pack("=Qi", part, place), 0)
            os.close(place)
    call(restrict_self, rules, 0)
    os.close(rules)


def _child_set_guards(plan: dict[str, Any], readable: list[str]) -> None:
    """Add the audit hooks, each with names and builtins that the program cannot reach."""
    devices = [os.devnull, "/dev/urandom", "/dev/random"]
    ends = (plan["folder"], plan["report"], plan["token"].encode())
    for install, values in (
        ("_guard_reads", (plan["folder"], [plan["folder"], *readable, *devices])),
        ("_guard_end", ends),
    ):
        names: dict[str, Any] = {"__builtins__": dict(vars(builtins))}
        exec(plan["guards"], names)
        names[install](*values)


def _child_run(program: str) -> None:
    """Run the program as `__main__`.

    This frame reports the end only if the program reached it: nothing here may catch exceptions.
    """
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    audit = sys.audit
    audit("knn_moe.begin")
    sys.modules["__main__"] = main
    exec(compile(program, "<program>", "exec", dont_inherit=True), main.__dict__)
    audit("knn_moe.end")


def _child_describe(error: BaseException) -> bytes:
    if isinstance(error, SystemExit):
        return b"exited early"
    name = type(error).__name__
    try:
        text = f"{name}: {error}" if str(error) else name
    except BaseException:  # the program may define the __str__ of its errors
        text = name
    return text[:500].encode("utf-8", "backslashreplace")


def _guard_end(folder: str, report: int, token: bytes) -> None:
    """Add a hook that ends the process at the first offence, and sends the token at the end.

    It never raises, because a traceback would show the token, and calls no code of the program.
    """
    write, leave, caller = os.write, os._exit, sys._getframe
    offence = _guard_offences(folder)
    runner: list[FrameType] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        found: str | None = "a guard that failed"
        try:
            if event == "knn_moe.begin" and not runner:
                runner.append(caller(1))
            elif event == "knn_moe.end" and caller(1) is runner[0]:
                write(report, token)
            found = offence(event, args)
        finally:
            if found is not None:
                write(report, b"not allowed: " + found[:500].encode("utf-8", "backslashreplace"))
                leave(1)

    sys.addaudithook(hook)


def _guard_reads(folder: str, readable: list[str]) -> None:
    """Add a hook that refuses to read elsewhere, with an error: the library itself tries to."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and type(args[2]) is int and args[2] & _WRITES
        if event in ("open", "os.listdir", "os.scandir") and not writes:
            path = _guard_path(args[0], folder)
            if path and not any(path == top or path.startswith(top + "/") for top in readable):
                raise PermissionError(f"not allowed: {event} {path}")

    sys.addaudithook(hook)


def _guard_path(path: object, folder: str) -> str | None:
    """Return the absolute path without dots, or None for anything but plain text."""
    if type(path) is bytes:
        path = path.decode("latin-1")
    if type(path) is not str:
        return None
    parts: list[str] = []
    for part in (path if path.startswith("/") else f"{folder}/{path}").split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def _guard_offences(folder: str) -> Callable[[str, tuple[Any, ...]], str | None]:
    """Return a function that names the offence of an audit event, or None."""
    closed, changes = tuple(_CLOSED.split()), _CHANGES.split()
    imports, new = _IMPORTS.split(), itertools.count(1)

    def inside(path: object) -> bool:
        absolute = _guard_path(path, folder)
        return absolute is not None and f"{absolute}/".startswith(f"{folder}/")

    def opened(path: object, flags: object) -> str | None:
        # The methods of another type could be code of the program.
        if type(path) not in (str, bytes, int) or type(flags) is not int:
            return "open by no plain path"
        if type(path) is int or not flags & _WRITES or _guard_path(path, folder) == "/dev/null":
            return None
        if not inside(path):
            return f"open {_guard_path(path, folder)} to write"
        return "so many files" if next(new) > _MOST_FILES else None

    def judge(event: str, args: tuple[Any, ...]) -> str | None:
        if event.startswith(closed):
            return event
        if event == "import":
            if type(args[0]) is not str:
                return event
            return f"import {args[0]}" if args[0] in imports else None
        if event == "open":
            return opened(args[0], args[2])
        if event == "os.chdir" and _guard_path(args[0], folder) != folder:
            return event  # paths are taken as relative to `folder` here
        if event in changes and not all(map(inside, args[: 1 + (event == "os.rename")])):
            return f"{event} {_guard_path(args[0], folder)}"
        return "so many files" if event == "os.mkdir" and next(new) > _MOST_FILES else None

    return judge


def _source(start: str) -> str:
    """Return the source of the functions of this file whose names start with `start`."""
    named = [value for name, value in globals().items() if name.startswith(start)]
    return "\n".join(map(inspect.getsource, filter(inspect.isfunction, named)))


GUARDS: Final = f"""
from __future__ import annotations
import itertools, os, sys
_CLOSED, _IMPORTS, _CHANGES = {_CLOSED!r}, {_IMPORTS!r}, {_CHANGES!r}
_WRITES, _MOST_FILES = {_WRITES}, {_MOST_FILES}
{_source("_guard")}
"""
CHILD: Final = f"""
from __future__ import annotations
import builtins, ctypes, json, os, resource, struct, sys
from contextlib import suppress
from types import ModuleType
{_source("_child")}
_child()
"""
