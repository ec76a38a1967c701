"""What tests of tools share: a model that parses calls, requests to it, and scripted parts of its answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Part, Row, TokenLogprob
from headrace.broker.models.cards import ModelCard
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, Step, chat, end, frontend, post

TOOL_CARD = msgspec.structs.replace(CARD, tool_parser="hermes", context_length=4096)
THINKER = msgspec.structs.replace(TOOL_CARD, reasoning_parser="think")
TEMPLATE = "{{ tools | tojson if tools else '-' }}{% for m in messages %}<{{ m.role }}>{{ m | tojson }}{% endfor %}"

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LARK = {
    "type": "custom",
    "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}},
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "what time it is", "strict": True}}


def serving(card: ModelCard = TOOL_CARD, script: Any = None) -> FakeIngress:
    ingress = FakeIngress(script)
    ingress.models.served[MODEL] = FakeServed(card, FILES | {"chat_template.jinja": TEMPLATE.encode()})
    return ingress


async def ask(card: ModelCard = TOOL_CARD, script: Any = None, **body: Any) -> tuple[Call, FakeIngress]:
    ingress = serving(card, script)
    return await post(frontend(ingress).app, chat(**body)), ingress


async def job_of(card: ModelCard = TOOL_CARD, **body: Any) -> Job:
    call, ingress = await ask(card, **body)
    assert call.status == 200, call.body
    return ingress.jobs[0]


def parts(*tokens: list[Part], logprobs: bool = False, **finish: Any) -> Any:
    """One row per token, each releasing these parts; then the end."""

    def script(job: Job) -> Iterable[Step]:
        for i, token in enumerate(tokens):
            fin = end(**finish) if i == len(tokens) - 1 else None
            said = [TokenLogprob(65, b"A", -0.5)] if logprobs else None
            yield [Row("job", 1, 7, c, i, [65], [token or ""], said, fin) for c in range(job.choices)]

    return script


def tool(text: str = "", index: int = 0, call: str | None = None, name: str | None = None) -> Part:
    return Part("tool", text, index, call, name)
