"""The figures of a tree are those of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.dev import house
from deploy.dev.house import bars, walks

ROUTER = '''
"""Routes.

In two lines.
"""

from typing import Protocol
from headrace.broker import codec
from headrace.broker.codec import (
    decode,
)


# a comment
class Place(Protocol):
    def put(self) -> None: ...


class Doer:
    def __init__(self) -> None:
        self.codec = codec

    def do(self) -> None:
        decode()


class Plain:
    def do(self) -> None:
        """Do it."""
'''.lstrip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    texts = {
        "router/session.py": ROUTER,
        "router/__init__.py": "",
        "router/index/table.pyx": "a\nb\n",
        "broker/codec.py": "def decode() -> None:\n    pass\n" + "\n" * 60,
        "tools/bench.py": "import headrace.broker.codec\nfrom headrace.router import session\n",
        "tests/unit/test_one.py": "x\ny\n",
        "docs/guides/one.md": "three words here",
        "docs/assets.txt": "not counted",
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace/router").symlink_to("../router")
    return tmp_path


def test_each_figure_is_that_of_the_files(tree: Path) -> None:
    lines = ROUTER.count("\n") + 62
    assert bars(tree) == {
        "product lines": str(lines + 2),
        "product lines with tools": str(lines + 4),
        "modules": "3",
        "folders with code": "3",
        "import lines / code lines": "7 / 18 = 38.9%",
        "modules that one other imports": "1",
        "modules under 60 lines": "2",
        "imports between modules": "3",
        "own Protocols": "1",
        "classes with a constructor and one public method": "1",
        "test lines": "2",
        "words in docs/": "3",
    }


def test_the_ways_through_a_tree_are_counted_by_its_own_code_and_else_by_ours(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    for root in (ours, other):
        (root / house.WALKS).parent.mkdir(parents=True)
    (ours / house.WALKS).write_text('print(\'{"token back": ["router"]}\')\n')
    assert walks(other, ours) == {"token back": ["router"]}
    (other / house.WALKS).write_text("print('{\"token back\": []}')\n")
    assert walks(other, ours) == {"token back": []}
