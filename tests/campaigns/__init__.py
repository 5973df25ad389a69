"""Campaigns: many injected faults, bounded and seeded, and what they did to the project.

Each module has `run(count, seed, scratch) -> Tally`, which injects `count` faults drawn from `seed`
and uses only files under `scratch`. One that cannot run everywhere has `unavailable(scratch)`,
which returns the reason where it cannot.
"""

from typing import Final

# The faults of each campaign's long form.
CAMPAIGNS: Final[dict[str, int]] = {
    "kills": 2000,
    "power_cuts": 200,
    "mutants": 12_000,
    "endpoints": 400,
    "programs": 444,
    "interrupts": 1000,
    "threads": 900,
}
