"""Commands that confine a process: bubblewrap, or user namespaces where that is not installed.

Both give it no network, a process tree that dies with this process, and a file system of its own:
Python and the system's libraries, read-only, and an empty /tmp. Knows nothing of programs or tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from knn_moe.errors import ProgramError

PYTHON: Final = os.path.realpath(sys.executable)
ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp"}

_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM: Final = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/nix/store", "/etc/ld.so.cache", "/etc/localtime",
)  # fmt: skip
_RESTRICTION: Final = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_NOBODY: Final = ("--reuid=65534", "--regid=65534", "--clear-groups")
_NO_RIGHTS: Final = ("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")

# Builds a root in /sys, which every Linux has and where no Python is, and runs a command in it. The
# shell is the first process of its tree, and all others end with it. It must stay: a process that
# changes its user is no longer killed when its parent ends.
_BUILD_ROOT: Final = """
set -e
megabytes=$1 readable=$2
shift 2
mount -t tmpfs -o size=1m,mode=755 root /sys
IFS='
'
for path in $readable; do
  if [ -d "$path" ]; then mkdir -p "/sys$path"
  else mkdir -p "/sys${path%/*}"; : >> "/sys$path"; fi
  mount --rbind "$path" "/sys$path"
done
IFS=' '
while read -r _ _ _ _ place _; do
  case $place in /sys/*)
    place=$(printf %b "$place")
    [ ! -e "$place" ] || mount -o remount,bind,ro "$place"
  esac
done < /proc/self/mountinfo
mkdir /sys/tmp
ln -s /tmp /sys/dev/shm
mount -t tmpfs -o "size=${megabytes}m,nr_inodes=4096,mode=1777" tmp /sys/tmp
mount -o remount,bind,ro /sys
set +e
exec 3>&2 2>/dev/null  # where the shell says that a command was killed
(exec unshare --root=/sys --wd=/tmp setpriv "$@" 2>&3 3>&-)
exit $?
"""


@dataclass(frozen=True)
class Confinement:
    """A way to confine a process."""

    name: str  # "bubblewrap", "unshare" or "none"
    command: Callable[[int], list[str]]  # megabytes of /tmp → what comes before the command line

    @property
    def confines(self) -> bool:
        return self.name != "none"


def _bubblewrap(megabytes: int) -> list[str]:
    command = [
        _find_tool("bwrap"),
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
    ]
    command += ["--die-with-parent", "--new-session", "--dir", "/dev", "--dir", "/etc"]
    for path in _readable():
        command += ["--dev-bind" if path in _DEVICES else "--ro-bind", path, path]
    command += ["--symlink", "/tmp", "/dev/shm", "--perms", "1777"]
    command += ["--size", str(megabytes << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    command += ["--remount-ro", "/"]
    if os.geteuid() != 0:
        return command
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        command += ["--cap-add", capability]
    return [*command, "setpriv", *_NOBODY, *_NO_RIGHTS]


def _unshare(megabytes: int) -> list[str]:
    root = os.geteuid() == 0
    command = [_find_tool("setpriv"), "--pdeathsig=KILL", _find_tool("unshare"), "--mount"]
    command += ["--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
    command += [] if root else ["--user", "--map-root-user"]
    command += ["sh", "-c", _BUILD_ROOT, "sh", str(megabytes), "\n".join(_readable())]
    return [*command, *(_NOBODY if root else ()), *_NO_RIGHTS]


def _find_tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed")
    return found


def _readable() -> list[str]:
    """Return the paths that Python needs, none of them inside another."""
    python = {sys.base_prefix, sys.base_exec_prefix, str(Path(PYTHON).parent)}
    paths = {Path(path) for path in (*_SYSTEM, *_DEVICES, *python) if os.access(path, os.R_OK)}
    return sorted(str(path) for path in paths if paths.isdisjoint(path.parents))


UNCONFINED: Final = Confinement("none", lambda megabytes: [])
CONFINEMENTS: Final = (Confinement("bubblewrap", _bubblewrap), Confinement("unshare", _unshare))


@cache
def find_confinement() -> Confinement:
    """Return the first way to confine a process that works here.

    Raises:
        ProgramError: None does; the message says why.
    """
    reasons = []
    for confinement in CONFINEMENTS:
        reason = try_out(confinement)
        if reason is None:
            return confinement
        reasons.append(f"{confinement.name}: {reason}")
    if _RESTRICTION.exists() and _RESTRICTION.read_text().strip() == "1":
        reasons.append(f"AppArmor restricts user namespaces: {_RESTRICTION} is 1")
    raise ProgramError(
        f"Generated programs cannot be confined on this machine ({'; '.join(reasons)}). Install "
        f"bubblewrap, or run them without protection with --run-unconfined."
    )


def try_out(confinement: Confinement) -> str | None:
    """Return why a trivial program cannot be run, or None."""
    try:
        done = subprocess.run(
            [*confinement.command(1), PYTHON, "-I", "-S", "-c", "pass"],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.decode("utf8", "replace").strip().splitlines()
    return None if done.returncode == 0 else (said[0] if said else f"exit code {done.returncode}")
