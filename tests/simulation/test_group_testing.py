"""Poison in a crowd, in virtual time, with real sessions and a real router: found with few crashes, and no innocent pays.

HEADRACE_SEEDS: how many runs per deployment, as in `test_protocol.py`; these are larger, so a fifth of that.
"""

import os

import pytest

from tests.simulation.protocol.configs import GROUPS
from tests.simulation.search import assert_holds

FEW = ("1 of 64 on 4", "6 kills on 3")  # one of each kind, that test-fast plays too
SEEDS = max(1, int(os.environ.get("HEADRACE_SEEDS", "5")) // 5)


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.deep) for name in GROUPS])
@pytest.mark.timeout(36000 if SEEDS > 20 else 120)
def test_poison_is_found_in_a_crowd_and_kills_convict_no_request(name: str) -> None:
    """`Deployment` checks each crash against the bounds of the shape, and each end against what really happened."""
    assert assert_holds(GROUPS[name], range(SEEDS)) > 0
