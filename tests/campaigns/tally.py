"""What a campaign found: how many faults it injected, and what went wrong after which of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """The faults of one campaign, counted by kind, and every failure in words."""

    name: str
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def passed(self, kind: str) -> None:
        """Count a fault of `kind` that did no harm."""
        self.faults[kind] += 1

    def failed(self, kind: str, what: str) -> None:
        """Count a fault of `kind` that did harm, and say what happened."""
        self.faults[kind] += 1
        self.failures.append((kind, what))

    def table(self) -> str:
        """Return a line for each kind of fault, and the first failures in words."""
        harmed = Counter(kind for kind, _ in self.failures)
        lines = [f"{self.name:40} {'faults':>8} {'failures':>8}"]
        for kind, count in sorted(self.faults.items()):
            lines.append(f"  {kind:38} {count:8,} {harmed[kind]:8,}")
        lines.append(f"  {'all':38} {self.faults.total():8,} {len(self.failures):8,}")
        lines += [f"  ! {kind}: {what}" for kind, what in self.failures[:20]]
        return "\n".join(lines)
