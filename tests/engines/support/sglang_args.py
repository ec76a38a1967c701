"""The settings of small SGLang engines for tests, in float32."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

BLOCK = 32
ARGS: dict[str, Any] = {"dtype": "float32", "context_length": 1024, "max_total_tokens": 4096, "max_running_requests": 8}

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here (`make install ENGINE=sglang`)"
)
