"""A new environment in which only the wheel of this project is installed, as pip installs it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the project's wheel in `folder` and return its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment and an empty home, without this repository on any path.

    What the wheel requires is read from the environment that runs the tests: installing torch
    again would take minutes.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path, wheel: Path) -> CleanEnvironment:
        """Create the environment in `folder` and install `wheel` there."""
        venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        install = ["-m", "pip", "--python", str(venv), "install", "-q", "--no-deps", str(wheel)]
        subprocess.run([sys.executable, *install], check=True)
        (packages,) = venv.glob("lib/python*/site-packages")
        # A path in a .pth file is added as it is: the editable install that lies there is not.
        (packages / "required.pth").write_text(sysconfig.get_path("purelib"), encoding="utf8")
        (folder / "home").mkdir()
        (folder / "work").mkdir()
        return cls(folder)

    @property
    def work(self) -> Path:
        """The folder that commands run in."""
        return self.folder / "work"

    def run(self, command: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        """Run a line of bash as a new user would, offline, with `typed` as standard input.

        Of programs there are the system's, and what the wheel has put beside Python.
        """
        environment = {
            "HOME": str(self.folder / "home"),
            "PATH": f"{self.folder / 'venv' / 'bin'}:/usr/bin:/bin",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
            environment["ATEN_CPU_CAPABILITY"] = capability
        return subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", command],
            cwd=self.work,
            env=environment,
            input=typed,
            capture_output=True,
            text=True,
            check=False,
        )
