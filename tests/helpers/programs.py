"""Programs for the sandbox: hostile ones, fakes, right ones, by what each tries."""

from __future__ import annotations

HOSTILE = {
    "fork bomb": "import os\nfor _ in range(8): os.fork()\nwhile True: pass",
    "subprocesses": """
        import subprocess, sys
        while True: subprocess.Popen([sys.executable, "-c", "while True: pass"])
    """,
    "shell": "import os\nassert os.system(f'touch {FOLDER}/new') == 0",
    "exec": "import os\nos.execv('/bin/sh', ['sh', '-c', f'touch {FOLDER}/new'])",
    "multiprocessing": """
        import multiprocessing
        while True: multiprocessing.Process(target=print).start()
    """,
    "write by absolute path": "open(f'{FOLDER}/victim.txt', 'w').write('gone')",
    "write a new file": "open(f'{FOLDER}/new', 'w')",
    "write by dots": """
        import os
        path = os.path.relpath(f"{FOLDER}/victim.txt")
        assert path.startswith("..")
        open(path, "w")
    """,
    "write by symlink": "import os\nos.symlink(FOLDER, 'link')\nopen('link/victim.txt', 'w')",
    "write by hard link": "import os\nos.link(f'{FOLDER}/victim.txt', 'here')\nopen('here', 'w')",
    "write by os.open": "import os\nos.open(f'{FOLDER}/new'.encode(), os.O_CREAT | os.O_RDWR)",
    "write by a changing path": """
        import io
        class Path:
            calls = 0
            def __fspath__(self):
                Path.calls += 1
                return "mine" if Path.calls == 1 else f"{FOLDER}/new"
        io.FileIO(Path(), "w")
        raise ValueError
    """,
    "write beside, from below": """
        import os
        os.makedirs("a/b/c")
        here = os.open(".", os.O_RDONLY)
        up = os.path.relpath(FOLDER)
        os.chdir("a/b/c")
        os.open(f"{up}/new", os.O_CREAT | os.O_RDWR, dir_fd=here)
    """,
    "delete": "import os\nos.remove(f'{FOLDER}/victim.txt')",
    "delete a tree": "import shutil\nshutil.rmtree(FOLDER)",
    "rename": "import os\nos.rename(f'{FOLDER}/victim.txt', 'mine')",
    "truncate": "import os\nos.truncate(f'{FOLDER}/victim.txt', 0)",
    "make a folder": "import os\nos.mkdir(f'{FOLDER}/new')",
    "connect": "import socket\nsocket.create_connection(('127.0.0.1', PORT)).send(b'hello')",
    "fetch": "import urllib.request as r\nr.urlopen(f'http://127.0.0.1:{PORT}', timeout=1)",
    "listen": "import socket\nsocket.create_server(('127.0.0.1', 0))",
    "kill its parent": "import os\nos.kill(os.getppid(), 9)",
    "kill everybody": "import os\nos.kill(-1, 15)",
    "foreign functions": """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.kill(os.getppid(), 9) == 0
    """,
}
FAKES = {
    "writes to every pipe": "send(b'passed', b'True', b'')\nos._exit(0)",
    "looks through the frames": "hunt(sys._getframe())\nos._exit(0)",
    "looks through a traceback": """
        try: open("/etc/passwd")
        except PermissionError as error:
            step = error.__traceback__
            while step: hunt(step.tb_frame); step = step.tb_next
        os._exit(0)
    """,
    "looks through memory": """
        import gc
        for value in gc.get_objects(): hunt(value) if hasattr(value, "f_back") else None
        os._exit(0)
    """,
    "reads standard input": "send(sys.stdin.buffer.read(), os.pread(0, 99, 0))\nos._exit(0)",
    "claims the end": "sys.audit('knn_moe.begin')\nsys.audit('knn_moe.end')\nos._exit(0)",
    "claims the end in its error": """
        import functools
        class Fake(Exception): __str__ = functools.partial(sys.audit, "knn_moe.end")
        raise Fake
    """,
    "claims the end at exit": """
        import atexit
        atexit.register(sys.audit, "knn_moe.end")
        sys.exit(0)
    """,
    "replays the runner": """
        import types
        runner = sys._getframe(1)
        if runner.f_code.co_name != "_child_run": raise LookupError
        types.FunctionType(runner.f_code, runner.f_globals)("pass")
        os._exit(0)
    """,
    "changes the runner's names": """
        runner = sys._getframe(1)
        for names in (runner.f_globals, runner.f_back.f_globals):
            for name in list(names):
                if name.startswith("_child"): names[name] = lambda *_: b"passed"
        raise ValueError
    """,
    "changes the builtins": """
        import builtins
        for name in ("type", "isinstance", "str", "BaseException", "SystemExit", "PermissionError"):
            setattr(builtins, name, lambda *_: hunt(sys._getframe()) or True)
        try: os.mkdir("new"); open("new/file", "w")
        finally: os._exit(0)
    """,
    "changes the modules": """
        os.write = os._exit = sys.exit = sys.audit = lambda *_: send(b"passed")
        sys.modules.clear()
        raise ValueError
    """,
    "traces the runner": """
        sys.settrace(lambda *_: None)
        os._exit(0)
    """,
    "equals everything": """
        class Always:
            def __eq__(self, other): return True
            def __hash__(self): hunt(sys._getframe()); return 0
        sys.audit("import", Always())
        os._exit(0)
    """,
    "stops its guards": "sys.addaudithook(lambda *_: 1 / 0)\nos._exit(0)",
}
RIGHT = {
    "empty": "",
    "comment": "# nothing",
    "long": "x = 1\n" * 50_000,
    "library": """
        import bisect, collections, copy, csv, datetime, decimal, enum, fractions, functools
        import hashlib, heapq, io, itertools, json, logging, math, operator, os, pathlib, random
        import re, shutil, statistics, string, struct, subprocess, sys, tempfile, threading, time
        import typing, unittest, uuid, zlib
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
        assert __name__ == "__main__"
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
    "output": """
        import contextlib, io
        with contextlib.redirect_stdout(io.StringIO()) as out: print("hello")
        assert out.getvalue() == "hello\\n"
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
