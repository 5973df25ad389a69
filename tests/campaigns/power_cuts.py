"""Cut the power of a disk while a job writes to it, or just after the job has ended.

The disk is an ext4 file system in an image file, mounted by the kernel. A cut is a copy of the
image as it is at that moment: it lacks all that the kernel still has in its cache. Sometimes the
kernel has written back some files of its own accord before. The copy is mounted, which replays the
journal of the file system, and must hold what was promised: the old memory or the new one, and the
new one if the job had ended. The job that is started again must end as if nothing had happened.

Needs root and loop devices.
"""

from __future__ import annotations

import filecmp
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from campaigns.jobs import Inputs, digest_folder, make_jobs, run_apart
from campaigns.kills import Expected, check_whole, prepare, wait, watch
from campaigns.tally import Tally

_BYTES = 48 << 20


def unavailable(scratch: Path) -> str | None:
    """Return why disks cannot be mounted here, or None if they can."""
    if os.geteuid() or not shutil.which("mkfs.ext4"):
        return "power cuts need root and mkfs.ext4"
    try:
        with _mounted(_make_disk(scratch / "try.img"), scratch / "try"):
            return None
    except subprocess.CalledProcessError as error:
        return f"no disk can be mounted here: {error.stderr.decode().strip()}"


def run(count: int, seed: int, scratch: Path) -> Tally:
    """Cut the power `count` times, of every kind of job in turn."""
    tally, draw = Tally("power cuts"), random.Random(seed)
    inputs = scratch / "inputs"
    inputs.mkdir()
    runs = [Expected(job, scratch) for job in make_jobs(Inputs(inputs))]
    empty = _make_disk(scratch / "empty.img")
    for number in range(count):
        expected = runs[number % len(runs)]
        # A disk has a new name each time: the kernel may still hold the blocks of the last one.
        disk = Path(shutil.copy(empty, scratch / f"disk-{number}.img"))
        harm = _cut_and_repeat(expected, disk, scratch, draw)
        if harm is None:
            tally.passed(expected.job.name)
        else:
            tally.failed(expected.job.name, harm)
    return tally


def _cut_and_repeat(
    expected: Expected, disk: Path, scratch: Path, draw: random.Random
) -> str | None:
    """Cut the power once, and let the job end after that; return what went wrong."""
    after = disk.with_suffix(".after")
    with _mounted(disk, scratch / "disk") as mounted:
        ended = _cut(expected, mounted / "work", disk, draw)
    disk.unlink()
    job, log = expected.job, scratch / "log"
    with _mounted(after, scratch / "disk") as mounted:
        folder = mounted / "work"
        harm = check_whole(expected, folder)
        if harm is None and ended and digest_folder(folder / job.output) != expected.after:
            harm = "what was written before the job ended is lost"
        if harm:
            return f"after the cut: {harm}"
        code = wait(run_apart(lambda: job.again(folder), log))
        if digest_folder(folder / job.output) != expected.after or code not in (0, 2):
            return f"after the second run (exit code {code}): {log.read_text()[-300:]}"
    after.unlink()
    return None


def _cut(expected: Expected, folder: Path, disk: Path, draw: random.Random) -> bool:
    """Start the job, copy its disk at a random moment, and return whether the job had ended."""
    copy = disk.with_suffix(".after")
    prepare(expected.job, folder)
    os.sync()
    at_event = draw.randint(1, max(expected.events, 1)) if draw.random() < 0.7 else None

    def work() -> None:
        watch(folder, at_event, signal.SIGSTOP)
        expected.job.start(folder)

    process = run_apart(work, disk.with_name("log"))
    _, status = os.waitpid(process, os.WUNTRACED)
    ended = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    if draw.random() < 0.5:
        _write_back(folder, draw)
    if draw.random() < 0.2:
        time.sleep(1.2)  # the file system commits every second
    shutil.copy(disk, copy)
    while not filecmp.cmp(disk, copy, shallow=False):  # the kernel wrote while it was copied
        shutil.copy(disk, copy)
    if os.WIFSTOPPED(status):
        os.kill(process, signal.SIGKILL)
        wait(process)
    return ended


def _write_back(folder: Path, draw: random.Random) -> None:
    """Write some files to the disk, as the kernel may at any time."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in draw.sample(files, len(files) // 2):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _make_disk(path: Path) -> Path:
    path.write_bytes(b"")
    os.truncate(path, _BYTES)
    _run("mkfs.ext4", "-q", "-F", path)
    return path


@contextmanager
def _mounted(disk: Path, place: Path) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    _run("mount", "-o", "loop,commit=1", disk, place)
    try:
        yield place
    finally:
        _run("umount", place)


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
