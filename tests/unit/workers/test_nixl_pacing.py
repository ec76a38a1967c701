"""NIXL's progress thread pauses; asked of the real bindings, without an agent."""

import subprocess
import sys

import pytest

from tests.support.nixl_peer import needs_nixl

pytestmark = needs_nixl  # which does not import it: it brings PyTorch along

SHOW = """
from headrace.workers.kit import PAUSE_US, pace_nixl
from nixl import _api
real = _api.nixlBind.nixlAgentConfig
assert pace_nixl()
config = _api.nixlBind.nixlAgentConfig()
assert isinstance(config, real), "the bindings would not take it"
config.pthrDelay = 0  # as NIXL's class does
config.useProgThread = True
assert real.pthrDelay.__get__(config) == PAUSE_US > 0, "what the bindings read"
assert config.useProgThread
assert _api.nixlBind.nixlAgent is not None
print("paced")
"""


@pytest.mark.slow
def test_what_nixls_class_sets_is_not_taken() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip().endswith("paced"), done.stderr
