"""`python -m tests.support.chat_templates.expect` writes every `expected.json` anew, with the installed transformers."""

from __future__ import annotations

import json

from tests.support.chat_templates.cases import FOLDER, conversations, load, names
from tests.support.chat_templates.reference import rendered


def main() -> None:
    for name in names():
        family = load(name)
        expected = {conversation.name: rendered(family, conversation) for conversation in conversations()}
        told = json.dumps(expected, ensure_ascii=False, indent=1)
        (FOLDER / name / "expected.json").write_text(told + "\n")
        refused = [case for case, result in expected.items() if "text" not in result]
        print(f"{name}: {len(expected)} conversations, without a text: {refused}")


if __name__ == "__main__":
    main()
