"""The support table in docs/engines.md, made from what the engines declare (`headrace.workers.engine_registry.supports`).

`python -m tests.docs.engine_table` writes it anew; a test compares. No engine needs to be installed.
"""

from __future__ import annotations

import textwrap

from headrace.workers.engine_registry import supports
from headrace.workers.kit import EngineSupport
from tests.docs.blocks import ROOT

FILE = ROOT / "docs" / "engines.md"
BEGIN = "<!-- engines: made by tests/docs/engine_table.py -->"
END = "<!-- end of engines -->"

ROWS = {
    "kind chat": "chats",
    "kind completion": "completions",
    "kind embedding": "embeddings",
    "kind score": "scores of pairs",
    "kind classify": "classes",
    "kind image": "pictures from text",
    "kind video": "videos from text",
    "seeds": "seeds",
    "resume": "an answer goes on after a crash",
    "resume_guided": "… in the middle of structured output",
    "resume_penalties": "… with presence and frequency penalties",
    "resume_repetition": "… with a repetition penalty",
    "logprobs": "log-probabilities",
    "prompt_logprobs": "… of prompts",
    "guided json": "structured output: `json`",
    "guided json_object": "… `json_object`",
    "guided regex": "… `regex`",
    "guided choice": "… `choice`",
    "guided grammar": "… `grammar`",
    "guided structural_tag": "… `structural_tag`",
    "prompt_embeds": "prompts as embeddings",
    "media image": "images",
    "media video": "videos",
    "media audio": "sounds",
    "lora static": "adapters of the start",
    "lora dynamic": "adapters, also while it serves",
    "cache_salt": "cache salts",
    "priority": "priorities",
    "kv_events": "cache events",
    "role aggregated": "role aggregated",
    "role prefill": "role prefill",
    "role decode": "role decode",
    "role encode": "role encode",
    "role embedding": "role embedding",
    "handover params": "KV transfer by parameters",
    "handover rendezvous": "KV transfer by rendezvous",
}
"""The words of the table, in its order. Sleep levels and operations follow; those with the same cells share a row."""


def table() -> str:
    engines = supports()
    found = frozenset[str]().union(*(engine.words for engine in engines))
    lines = [f"| | {' | '.join(engine.title for engine in engines)} |", "|---" * (len(engines) + 1) + "|"]
    lines += [f"| {ROWS[word]} | {' | '.join(_cell(engine, word) for engine in engines)} |" for word in ROWS if word in found]
    shown = set(ROWS)
    for family in ("sleep level", "operation"):
        alike: dict[str, list[str]] = {}  # by what the engines say of them
        for word in sorted(found):
            if word.startswith(f"{family} "):
                shown.add(word)
                cells = " | ".join(_cell(engine, word) for engine in engines)
                alike.setdefault(cells, []).append(f"`{word.removeprefix(f'{family} ')}`")
        lines += [f"| {family}{'s' * (len(names) > 1)} {', '.join(names)} | {cells} |" for cells, names in alike.items()]
    if missing := found - shown:
        raise LookupError(f"these abilities have no row: {sorted(missing)}")
    return "\n".join(lines)


def _cell(engine: EngineSupport, word: str) -> str:
    if word not in engine.words:
        return "no"
    condition = engine.conditions.get(word)
    return ("yes" if condition is None else f"with {condition}") + (" ¹" if word in engine.untried else "")


def reasons() -> str:
    """The abilities without a contract test, and why, in lines per engine."""
    lines = []
    for engine in supports():
        by_reason: dict[str, list[str]] = {}
        for word in sorted(engine.untried, key=lambda word: [*ROWS, word].index(word)):
            by_reason.setdefault(engine.untried[word], []).append(ROWS.get(word, word).removeprefix("… "))
        for why, found in by_reason.items():
            what = "everything" if engine.untried.keys() == engine.words and len(by_reason) == 1 else ", ".join(found)
            lines.append(
                textwrap.fill(f"* {engine.title}, {what}: {why}.", 128, subsequent_indent="  ", break_on_hyphens=False)
            )
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The document with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{table()}\n\n¹ Not driven by a contract test:\n\n{reasons()}"
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


if __name__ == "__main__":
    FILE.write_text(with_table(FILE.read_text()))
