"""Verdicts in a file, written as they come, so that a judge is asked only once for each."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

from knn_moe.errors import LabelError
from knn_moe.labels.label import Judge, as_score


class WrittenVerdicts:
    """A judge that writes every verdict of `judge` to a file, and asks for none that is there.

    Args:
        judge: Any function of a prompt and an answer.
        path: A file of JSON lines. It is made with the first verdict.
        identity: What verdicts depend on beside the prompt and the answer, such as the name of the
            judge's model. Verdicts of another identity are not used.

    Raises:
        LabelError: The file cannot be read or written.
    """

    def __init__(self, judge: Judge, path: Path, identity: str) -> None:
        self.judge, self.path, self.identity = judge, path, identity
        try:
            self._known = self._read()
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise LabelError(
                f"Cannot continue with the verdicts in {str(path)!r} ({error}). Remove the file."
            ) from None

    def __call__(self, prompt: str, answer: str) -> float:
        """Return the verdict that is in the file, or ask for it and write it there."""
        text = json.dumps([self.identity, prompt, answer])
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self._known:
            self._known[key] = score = as_score(self.judge(prompt, answer))
            self._append({"key": key, "score": None if math.isnan(score) else score})
        return self._known[key]

    def remove(self) -> None:
        """Remove the file, once what it was needed for is written."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, float]:
        if not self.path.exists():
            return {}
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # the process was killed while it wrote the last line
            os.truncate(self.path, len(whole))
        lines = [json.loads(line) for line in whole.decode().splitlines()]
        return {
            str(line["key"]): math.nan if line["score"] is None else float(line["score"])
            for line in lines
        }

    def _append(self, line: dict[str, object]) -> None:
        try:
            with self.path.open("a", encoding="utf8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise LabelError(f"Cannot write a verdict to {str(self.path)!r}: {error}.") from None
