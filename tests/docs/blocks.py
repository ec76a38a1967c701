"""Commands in the documentation, taken out of it so that they can be run.

A fenced block is run when its info string says so:

    ```sh test            a shell script; every command must succeed
    ```sh test exit=78    its last command ends with this code
    ```python test        a Python program

The address of the running deployment takes the place of `127.0.0.1:8000` and `nats://127.0.0.1:4222`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)$")
_LANGUAGES = ("sh", "python")


class BadBlock(ValueError):
    """A block that is marked for testing but cannot be run."""


@dataclass(frozen=True, slots=True)
class Block:
    """One runnable block. `line` is where its fence stands, counted from 1."""

    file: str
    line: int
    language: str
    text: str
    exit_code: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def documents(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("**/*.md"))]


def blocks_of(markdown: str, file: str) -> Iterator[Block]:
    """The blocks marked for testing. Raises BadBlock for a mark that is not understood."""
    opened: tuple[int, str, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(markdown.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, lines = (number, fence["info"].strip(), fence["indent"]), []
        elif fence and not fence["info"].strip():
            start, info, _ = opened
            if (block := _block(file, start, info, lines)) is not None:
                yield block
            opened = None
        else:
            lines.append(line.removeprefix(opened[2]))
    if opened is not None:
        raise BadBlock(f"{file}:{opened[0]}: the block is never closed")


def _block(file: str, line: int, info: str, lines: list[str]) -> Block | None:
    language, *words = info.split() or [""]
    if "test" not in words:
        return None
    if language not in _LANGUAGES:
        raise BadBlock(f"{file}:{line}: cannot run {language!r}, only {' and '.join(_LANGUAGES)}")
    exit_code = 0
    for word in words:
        if word.startswith("exit="):
            exit_code = int(word.removeprefix("exit="))
        elif word != "test":
            raise BadBlock(f"{file}:{line}: {word!r} is not understood")
    return Block(file, line, language, "\n".join(lines) + "\n", exit_code)
