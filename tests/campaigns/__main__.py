"""Run campaigns of injected faults and print what they found: `make campaign`.

    python -m campaigns                     all of them, in their long form
    python -m campaigns mutants --count 500 --seed 7

Exits with 1 if a fault did harm. The tests run each campaign in its short form (test_short.py).
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

from campaigns import CAMPAIGNS


def main() -> int:
    """Run the campaigns that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m campaigns", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CAMPAIGNS)}")
    parser.add_argument("--count", type=int, help="faults of each campaign (default: its own)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(CAMPAIGNS))
    if unknown:
        parser.error(f"no campaign is called {unknown[0]!r}; there are {', '.join(CAMPAIGNS)}")
    harmed = False
    for name in options.names or CAMPAIGNS:
        campaign = importlib.import_module(f"campaigns.{name}")
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"campaign-{name}-") as folder:
            scratch = Path(folder)
            if hasattr(campaign, "unavailable") and (reason := campaign.unavailable(scratch)):
                print(f"{name}: skipped, because {reason}", flush=True)
                continue
            tally = campaign.run(options.count or CAMPAIGNS[name], options.seed, scratch)
        print(tally.table(), f"({time.monotonic() - began:.0f} s)", flush=True)
        harmed = harmed or bool(tally.failures)
    return int(harmed)


if __name__ == "__main__":
    sys.exit(main())
