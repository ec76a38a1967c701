"""The table of settings in docs/operations.md, made from the settings themselves.

`python -m tests.docs.settings_table` writes it anew; a test compares.
"""

from __future__ import annotations

from headrace.config.options import Option, all_options
from tests.docs.blocks import ROOT

FILE = ROOT / "docs" / "operations.md"
BEGIN = "<!-- settings: made by tests/docs/settings_table.py -->"
END = "<!-- end of settings -->"


def table() -> str:
    rows = ["| TOML key | flag | commands | type, default | meaning |", "|---|---|---|---|---|"]
    rows += [_row(option) for option in all_options()]
    return "\n".join(rows)


def _row(option: Option) -> str:
    commands = ", ".join("drain" if command == "control" else command for command in option.commands)
    flags = [f"`{flag}`" for flag in (option.setting.short, option.flag) if flag]
    flag = ", ".join(flags) or "none"
    meaning = option.setting.help.replace("|", "\\|")
    return f"| `{option.key}` | {flag} | {commands} | {_type(option)} | {meaning} |"


def _type(option: Option) -> str:
    choices = [*option.choices, *filter(None, [option.setting.other])]
    kind = " \\| ".join(choices) if option.kind == "choice" else option.kind
    if option.default in (None, (), {}):
        return kind
    default = {True: "true", False: "false"}.get(option.default) if option.kind == "switch" else f"{option.default}"
    return f"{kind}, `{default}`"


def with_table(text: str) -> str:
    """The document with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    FILE.write_text(with_table(FILE.read_text()))
