"""The table of settings in docs/operations.md, made from the settings themselves.

`python -m tests.docs.settings_table` writes it anew; a test compares.
"""

from __future__ import annotations

from headrace.config.catalogue import SETTINGS, Setting
from tests.docs.blocks import ROOT

FILE = ROOT / "docs" / "operations.md"
BEGIN = "<!-- settings: made by tests/docs/settings_table.py -->"
END = "<!-- end of settings -->"


def table() -> str:
    rows = ["| TOML key | flag | commands | type, default | meaning |", "|---|---|---|---|---|"]
    rows += [_row(setting) for setting in SETTINGS]
    return "\n".join(rows)


def _row(setting: Setting) -> str:
    commands = ", ".join("drain" if command == "control" else command for command in setting.commands)
    flag = f"`{setting.flag}`" if setting.flag else "none"
    meaning = setting.help.replace("|", "\\|")
    return f"| `{setting.key}` | {flag} | {commands} | {_type(setting)} | {meaning} |"


def _type(setting: Setting) -> str:
    kind = " \\| ".join(setting.choices) if setting.kind == "choice" else setting.kind
    if setting.default in (None, (), {}):
        return kind
    default = {True: "true", False: "false"}.get(setting.default) if setting.kind == "switch" else f"{setting.default}"
    return f"{kind}, `{default}`"


def with_table(text: str) -> str:
    """The document with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    FILE.write_text(with_table(FILE.read_text()))
