"""The lists in docs/settings.md, as `headrace config --markdown` prints them.

`python -m tests.docs.settings_table` writes them anew; a test compares.
"""

from __future__ import annotations

from headrace.commands.info import settings_markdown
from tests.docs.blocks import ROOT

FILE = ROOT / "docs" / "settings.md"
BEGIN = "<!-- settings: made by headrace config --markdown -->"
END = "<!-- end of settings -->"


def with_table(text: str) -> str:
    """The document with the lists as they should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{settings_markdown()}{END}{after}"


if __name__ == "__main__":
    FILE.write_text(with_table(FILE.read_text()))
