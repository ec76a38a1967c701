"""What agents send, as `make test-clients` recorded it (docs/clients.md): all of it is taken, and every tool offered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from headrace.frontend.anthropic import schema as messages
from headrace.frontend.chat_schema import HINTS, ChatRequest
from headrace.frontend.http.bodies import ReportingDecoder
from headrace.frontend.responses import schema as responses
from tests.support.frontend.answer_parts import content, say_parts
from tests.support.frontend.fakes import CARD, FILES, MODEL, TEMPLATE, FakeServed
from tests.support.frontend.responses_client import Client

FOLDER = Path(__file__).parents[2] / "clients" / "samples"
PROGRAMS = sorted(file.stem for file in FOLDER.glob("*.json"))
AGENT = msgspec.structs.replace(CARD, tool_parser="hermes", reasoning_parser="think", context_length=131_072)
REQUESTS: dict[str, tuple[type[msgspec.Struct], tuple[str, ...]]] = {
    "/v1/chat/completions": (ChatRequest, HINTS),
    "/v1/messages": (messages.MessagesRequest, messages.HINTS),
    "/v1/responses": (responses.ResponsesRequest, responses.HINTS),
}
OFFERING = "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}" + TEMPLATE


def tool_names(tools: list[dict[str, Any]]) -> Iterator[str]:
    """The names of the tools that a model can call, without those that a server would run."""
    for tool in tools:
        if tool.get("type") == "namespace":
            yield from tool_names(tool["tools"])
        elif tool.get("type") in (None, "custom", "function"):
            yield tool.get("function", tool)["name"]


def test_each_program_has_samples() -> None:
    assert PROGRAMS == ["claude", "codex", "opencode", "qwen"]


@pytest.mark.parametrize("program", PROGRAMS)
async def test_what_a_program_sends_becomes_a_job_that_offers_its_tools(program: str) -> None:
    for sample in json.loads((FOLDER / f"{program}.json").read_text()):
        client = Client(say_parts([content("Done.")], reason="stop"))
        client.ingress.models.served[MODEL] = FakeServed(AGENT, {**FILES, "chat_template.jinja": OFFERING.encode()})
        answer = await client.call("POST", sample["path"], {**sample["body"], "model": MODEL}, **sample["headers"])
        assert answer.status == 200, answer.body
        prompt = client.prompt()
        assert [name for name in tool_names(sample["body"].get("tools", [])) if f"{name}>" not in prompt] == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_field_that_a_program_sends_is_known(program: str) -> None:
    for sample in json.loads((FOLDER / f"{program}.json").read_text()):
        kind, hints = REQUESTS[sample["path"].partition("?")[0]]
        with capture_logs() as logs:
            ReportingDecoder(kind, hints).decode(json.dumps(sample["body"]).encode())
        assert logs == []
