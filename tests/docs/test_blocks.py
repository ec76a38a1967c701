"""Finding the commands in the documentation."""

from __future__ import annotations

import pytest

from tests.docs.blocks import BadBlock, Block, blocks_of

TEXT = """# Title
```sh
rm -rf /
```
```sh test
headrace version
```
1. indented
   ```python test
   if True:
       print("x")
   ```
```sh test exit=78
headrace worker --engine none
```
```
~ test
```
"""


def test_only_marked_blocks_are_taken_with_their_place() -> None:
    assert list(blocks_of(TEXT, "a.md")) == [
        Block("a.md", 5, "sh", "headrace version\n"),
        Block("a.md", 9, "python", 'if True:\n    print("x")\n'),
        Block("a.md", 13, "sh", "headrace worker --engine none\n", 78),
    ]


@pytest.mark.parametrize("info", ["toml test", "sh test exxit=1", "sh test slow"])
def test_a_mark_that_is_not_understood_is_an_error_and_not_a_silent_skip(info: str) -> None:
    with pytest.raises(BadBlock, match=r"a\.md:1"):
        list(blocks_of(f"```{info}\nx\n```\n", "a.md"))


def test_a_block_that_is_never_closed_is_an_error() -> None:
    with pytest.raises(BadBlock, match="never closed"):
        list(blocks_of("```sh test\nx\n", "a.md"))
