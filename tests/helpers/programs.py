"""Generated programs by what each does: right ones, wrong ones, and ones that do harm.

The tests of all of them are TESTS. A program knows FOLDER, a folder outside that everybody may
write to, with the file victim.txt; PORT, that of a server; and EVALUATOR, the number of the process
that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
RIGHT_ADD = "def add(a, b): return a + b\n"


@dataclass(frozen=True)
class Case:
    """A program, whether it passes (None: that is not promised), and whether it is endless."""

    program: str
    passes: bool | None
    endless: bool = False


RIGHT = {
    "plain": "",
    "comment": "# nothing",
    "long": "x = 1\n" * 50_000,
    "main block that reads": f"""
        {RIGHT_ADD.strip()}
        if __name__ == "__main__":
            print(add(*map(int, input().split())))
    """,
    "main block that tests": """
        import unittest
        if __name__ == "__main__":
            unittest.main()
    """,
    "main block that exits": f"""
        import sys
        {RIGHT_ADD.strip()}
        if __name__ == "__main__":
            sys.exit(add(0, 0))
    """,
    "library": """
        import bisect, collections, copy, csv, datetime, decimal, enum, fractions, functools
        import hashlib, heapq, io, itertools, json, logging, math, operator, os, pathlib, random
        import re, shutil, statistics, string, struct, subprocess, sys, tempfile, threading, time
        import typing, unittest, uuid, zlib, zoneinfo, sqlite3, ctypes, ssl
        assert json.loads(json.dumps({"a": [1.5, None]})) == {"a": [1.5, None]}
        assert re.findall(r"\\d+", "a1b22") == ["1", "22"]
        assert hashlib.sha256(b"").hexdigest().startswith("e3b0c442")
        assert datetime.date(2024, 2, 29).strftime("%d.%m.%Y") == "29.02.2024"
        assert "é".encode("latin-1").decode("cp1252") == "é"
        assert uuid.uuid4() != uuid.uuid4() and os.urandom(4)
    """,
    "classes": """
        from __future__ import annotations
        import dataclasses, pickle, typing
        @dataclasses.dataclass
        class Point:
            x: int
            y: typing.ClassVar[int] = 1
        Pair = typing.NamedTuple("Pair", [("a", int)])
        assert pickle.loads(pickle.dumps(Point(3))) == Point(3)
        assert typing.get_type_hints(Point)["x"] is int and Pair(1).a == 1
    """,
    "recursion": """
        import sys
        sys.setrecursionlimit(5000)
        def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
        assert depth(3000) == 3000
        def endless(): return endless()
        try: endless()
        except RecursionError: pass
    """,
    "files": """
        import os, pathlib, shutil, sys, tempfile
        with open("a.txt", "w") as file: file.write("é")
        assert open(os.path.join(os.getcwd(), "a.txt")).read() == "é"
        os.makedirs("b/c"); pathlib.Path("b/c/d").write_bytes(b"1"); os.rename("a.txt", "b/a")
        assert sorted(os.listdir("b")) == ["a", "c"] and os.path.expanduser("~") == os.getcwd()
        with tempfile.TemporaryDirectory() as folder: open(f"{folder}/x", "w").close()
        shutil.rmtree("b")
        print("told to nobody", file=open(os.devnull, "w")); print("é"); sys.stderr.write("x")
    """,
    "threads and processes": """
        import subprocess, sys
        from concurrent.futures import ThreadPoolExecutor
        from multiprocessing import Pool
        with ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [-1, 2])) == [1, 2]
        with Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]
        assert subprocess.run(["true"]).returncode == 0
    """,
    "a thread that does not end": """
        import threading
        threading.Thread(target=threading.Event().wait).start()
    """,
    "own exit": "try: raise SystemExit(1)\nexcept SystemExit: pass",
    "test suite": """
        import io, unittest
        class Case(unittest.TestCase):
            def test_sum(self): self.assertEqual(1 + 1, 2)
        cases = unittest.defaultTestLoader.loadTestsFromTestCase(Case)
        assert unittest.TextTestRunner(stream=io.StringIO()).run(cases).wasSuccessful()
    """,
}
# None of them defines the function that its tests call, so none can pass.
WRONG = {
    "nothing": "",
    "an error": "1 / 0",
    "no Python": "def f(:",
    "a NUL": "x = 1\x00",
    "a surrogate": "x = '\udc80'",
    "deep brackets": "x = " + "(" * 10_000,
    "an error that cannot be shown": """
        class Shy(Exception):
            def __str__(self): raise self
        raise Shy
    """,
    "an interrupt": "raise KeyboardInterrupt",
    "reads input": "import sys\nassert sys.stdin.read() == ''\ninput()",
    "exits": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits in a thread": """
        import os, threading
        threading.Thread(target=os._exit, args=[0]).start()
    """,
    "exits at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
    "ends by a signal": "import os\nos.kill(os.getpid(), 9)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "crashes by recursion": """
        import sys
        sys.setrecursionlimit(10**9)
        def f(x): return f([x]) and repr(x)
        f(0)
    """,
    "executes another program": "import os\nos.execv('/bin/true', ['true'])",
    "closes all files": "import os\nos.closerange(0, 256)",
    "writes to all files": """
        import os
        for fd in range(256):
            for text in (b"passed", b"True", b"ready", b"0" * 32):
                try: os.write(fd, text + b"\\n")
                except OSError: pass
    """,
    "replaces what a verdict needs": """
        import builtins, os, sys
        os.write = os.pread = os._exit = sys.exit = os.getpid = lambda *_: 0
        builtins.BaseException = builtins.AssertionError = builtins.NameError = str
        builtins.compile = builtins.exec = lambda *_: None
        sys.modules.clear()
    """,
    "forks and lets the child go on": "import os\nif os.fork(): raise ValueError",
    "imports what is not there": "import torch",
    "shadows the library": """
        open("json.py", "w").write("x = 1"); open("os.py", "w").write("x = 1")
        import importlib, sys
        sys.path.insert(0, ".")
        del sys.modules["json"]
        import json
        assert json.x == 1
    """,
}
HARM = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "thread bomb": """
        import threading
        while True: threading.Thread(target=threading.Event().wait).start()
    """,
    "process bomb": """
        import subprocess, sys
        while True: subprocess.Popen([sys.executable, "-c", "while True: pass"])
    """,
    "memory": "kept = []\nwhile True: kept.append(bytearray(1 << 20))",
    "a terabyte at once": "x = 'x' * (1 << 40)",
    "a large file": "file = open('x', 'wb')\nwhile True: file.write(bytes(1 << 20))",
    "many files": "for name in range(10**7): open(str(name), 'wb').write(bytes(1 << 12))",
    "shared memory": """
        from multiprocessing.shared_memory import SharedMemory
        kept = [SharedMemory(create=True, size=8 << 20) for _ in range(10**4)]
        for each in kept: each.buf[:] = bytes(8 << 20)
    """,
    "closes its folder": "import os\nos.chmod('.', 0)",
    "closes folders inside": "import os\nos.makedirs('a/b')\nos.chmod('a/b', 0)\nos.chmod('a', 0)",
    "deep folders": "import os\nfor _ in range(3000): os.mkdir('a'); os.chdir('a')",
    "deletes its folder": "import os, shutil\nshutil.rmtree(os.getcwd())",
    "deletes everything": "import shutil\nshutil.rmtree('/', ignore_errors=True)",
    "deletes a file outside": "import os\nos.remove(f'{FOLDER}/victim.txt')",
    "deletes a folder outside": "import shutil\nshutil.rmtree(FOLDER)",
    "writes outside": "open(f'{FOLDER}/victim.txt', 'w').write('gone')",
    "writes a new file outside": "open(f'{FOLDER}/new', 'w')",
    "writes by dots": "import os\nopen(os.path.relpath(f'{FOLDER}/victim.txt'), 'w')",
    "writes by a symbolic link": "import os\nos.symlink(FOLDER, 'a')\nopen('a/victim.txt', 'w')",
    "writes by a hard link": "import os\nos.link(f'{FOLDER}/victim.txt', 'a')\nopen('a', 'w')",
    "writes by the root of a process": """
        import os
        open(f"/proc/{os.getppid()}/root{FOLDER}/new", "w")
    """,
    "changes rights outside": "import os\nos.chmod(f'{FOLDER}/victim.txt', 0)",
    "renames a file outside": "import os\nos.rename(f'{FOLDER}/victim.txt', f'{FOLDER}/gone')",
    "a shell that writes": "import os\nos.system(f'touch {FOLDER}/new; rm -rf {FOLDER}')",
    "writes into the library": "import os\nopen(os.__file__, 'a').write('#')",
    "writes a start-up file": "import os, sys\nopen(f'{sys.prefix}/lib/sitecustomize.py', 'w')",
    "reads a file outside": "raise ValueError(open(f'{FOLDER}/victim.txt').read())",
    "mounts": "import os\nassert os.system('mount -t tmpfs x /usr || mount -o remount,rw /') == 0",
    "new namespaces": "import os\nassert os.system(f'unshare -Urm rm -rf {FOLDER}') == 0",
    "leaves its root": "import os\nos.mkdir('a'); os.chroot('a'); os.chroot('../../..')",
    "connects": "import socket\nsocket.create_connection(('127.0.0.1', PORT)).send(b'hello')",
    "fetches": "import urllib.request as r\nr.urlopen(f'http://127.0.0.1:{PORT}', timeout=5)",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\nraise ValueError",
    "kills the evaluator": "import os\nos.kill(EVALUATOR, 9)",
    "kills everybody": "import os\nos.kill(-1, 9)",
    "kills its group": "import os\nos.killpg(0, 9)",
    "kills by foreign functions": "import ctypes\nassert ctypes.CDLL(None).kill(EVALUATOR, 9) == 0",
    "kills by a descriptor": """
        import os, signal
        signal.pidfd_send_signal(os.pidfd_open(EVALUATOR), 9)
    """,
    "kills by input": """
        import fcntl, os
        read, write = os.pipe()
        fcntl.fcntl(read, fcntl.F_SETOWN, EVALUATOR)
        fcntl.fcntl(read, 10, 9)  # F_SETSIG, SIGKILL
        fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
        os.write(write, b"x")
    """,
    "kills by a limit": "import resource as r\nr.prlimit(EVALUATOR, r.RLIMIT_CPU, (0, 0))",
    "traces the evaluator": """
        import ctypes
        assert ctypes.CDLL(None).ptrace(16, EVALUATOR, 0, 0) == 0
    """,
    "reads the evaluator": "open(f'/proc/{EVALUATOR}/environ').read()",
    "raises its limits": "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))",
    "becomes another user": "import os\nos.setuid(1)\nraise ValueError",
    "devices": "import os\nos.mknod('a', 0o60666, os.makedev(254, 0))\nopen('a', 'wb').write(b'0')",
    "a child that stays": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 256)
                while True: time.sleep(1)
            os._exit(0)
        raise ValueError
    """,
    "a shell that stays": "import os\nos.system('setsid sleep 1000 &')\nraise ValueError",
}
ENDLESS = {
    "a loop": "while True: pass",
    "sleep": "import time\ntime.sleep(1e6)",
    "output": "while True: print('x' * 4096)",
    "errors": "import sys\nwhile True: sys.stderr.write('x')",
    "reports": """
        import os
        while True:
            for fd in range(3, 256):
                try: os.write(fd, b"x" * 4096)
                except OSError: pass
    """,
    "signals ignored": """
        import signal
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True: pass
    """,
    "a loop in C": "sum(iter(int, 1))",
    "a power": "10 ** 10 ** 10",
    "a regular expression": "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
    "all errors caught": """
        while True:
            try: raise KeyboardInterrupt
            except BaseException: continue
    """,
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "children that spin": """
        import os
        for _ in range(8):
            if os.fork() == 0: break
        while True: pass
    """,
}
# Written to forge a verdict, in the interpreter that also runs the tests: that is not prevented.
FORGED = {
    "equals everything": """
        class Always:
            def __eq__(self, other): return True
        def add(a, b): return Always()
    """,
    "replaces a builtin": "import builtins\nbuiltins.add = lambda a, b: 0 if a < 0 else 3",
    "looks for the nonce": """
        import os
        for fd in range(3, 256):
            for other in range(3, 256):
                try: os.write(other, os.pread(fd, 32, 0) + b"\\n")
                except OSError: pass
    """,
}


def all_cases() -> dict[str, Case]:
    """Return every program by its kind and name."""
    cases = {}
    for kind, programs, passes in (
        ("right", RIGHT, True), ("wrong", WRONG, False), ("harm", HARM, False),
        ("endless", ENDLESS, False), ("forged", FORGED, None),
    ):  # fmt: skip
        for name, text in programs.items():
            text = dedent(text).lstrip("\n")
            if passes:
                text += f"\n{RIGHT_ADD}"
            cases[f"{kind}: {name}"] = Case(text, passes, kind == "endless")
    return cases
