"""docs/engines.md says what the engines declare."""

from __future__ import annotations

import subprocess
import sys

from headrace.workers.engine_registry import NAMES, supports
from tests.docs.engine_table import FILE, with_table


def test_the_table_of_engines_is_up_to_date() -> None:
    text = FILE.read_text()
    assert text == with_table(text), "run: python -m tests.docs.engine_table"


def test_every_engine_of_ours_has_a_column() -> None:
    assert {engine.name for engine in supports()} == set(NAMES)


def test_the_table_needs_no_engine() -> None:
    program = (
        "import sys\n"
        "from headrace.workers.engine_registry import supports\n"
        "supports()\n"
        "print(sorted({'torch', 'vllm', 'sglang', 'tensorrt_llm', 'transformers'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
