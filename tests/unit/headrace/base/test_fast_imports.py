"""What commands do not load when they start."""

import subprocess
import sys

import pytest


def python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_a_command_does_not_import_rich_for_its_log_and_an_engine_still_can() -> None:
    """rich, where an engine or a tool has brought it."""
    pytest.importorskip("rich")
    python(
        "import sys; from headrace.cli import main; assert main(['version']) == 0; import headrace.base.logs;"
        "assert 'structlog' in sys.modules and 'rich' not in sys.modules; import rich.console; assert rich.console.Console"
    )


def test_a_command_does_not_collect_garbage_often_while_it_imports() -> None:
    python("import gc; from headrace.cli import main; assert main(['version']) == 0; assert gc.get_threshold()[0] >= 50_000")
