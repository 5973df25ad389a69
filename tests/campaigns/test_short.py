"""Every campaign in its short form: no injected fault does harm."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from campaigns import CAMPAIGNS

# Faults of the short form, where they are not 20.
_SHORT = {"kills": 16, "power_cuts": 16, "mutants": 150}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_no_fault_does_harm(name: str, tmp_path: Path) -> None:
    campaign = importlib.import_module(f"campaigns.{name}")
    if hasattr(campaign, "unavailable") and (reason := campaign.unavailable(tmp_path)):
        pytest.skip(reason)
    tally = campaign.run(_SHORT.get(name, 20), seed=0, scratch=tmp_path)
    assert not tally.failures, tally.table()
