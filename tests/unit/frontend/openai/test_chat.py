"""The roles of a chat's messages: those of OpenAI's API, and those that the model's template has besides."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.frontend.errors import BadRequest
from headrace.frontend.openai.chat import ROLES, named_roles
from headrace.frontend.prompts.templates import ChatTemplate
from tests.support.frontend.fakes import MODEL, FakeIngress, chat, frontend, post

NONSENSE = [{"role": "user", "content": "hi"}, {"role": "nonsense", "content": "x"}]
PLAIN = ChatTemplate("{% for m in messages %}{{ m['role'] }}{% endfor %}", names={})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(messages=NONSENSE)),
        ("/v1/chat/completions", chat(messages=NONSENSE, stream=True)),
        ("/tokenize", {"messages": NONSENSE}),
        ("/v1/chat/completions", chat(messages=NONSENSE, add_generation_prompt=False)),
    ],
)
async def test_a_word_that_is_no_role_is_refused_by_its_name(path: str, body: dict[str, Any]) -> None:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, body, path)
    assert (call.status, call.error["type"], call.error["param"]) == (400, "invalid_request_error", "messages[1].role")
    assert "'nonsense'" in call.error["message"]
    assert "system, developer, user, assistant, tool" in call.error["message"]
    assert ingress.jobs == []


async def test_each_api_refuses_it_in_its_own_shape() -> None:
    app = frontend(FakeIngress()).app
    call = await post(app, {"model": "m", "input": NONSENSE}, "/v1/responses")
    assert (call.status, call.error["param"]) == (400, "input[1].role")
    assert "'nonsense'" in call.error["message"]
    call = await post(app, {"model": "m", "max_tokens": 4, "messages": NONSENSE}, "/v1/messages")
    assert (call.status, call.json()["type"], call.error["type"]) == (400, "error", "invalid_request_error")
    assert "messages[1].role" in call.error["message"]
    assert "'nonsense'" in call.error["message"]
    call = await post(app, {"model": MODEL, "messages": NONSENSE, "stream": False}, "/api/chat")
    assert call.status == 400
    assert "'nonsense'" in call.json()["error"]


@pytest.mark.parametrize("role", ROLES)
def test_the_roles_of_the_api_are_taken_by_every_template(role: str) -> None:
    (message,) = named_roles([{"role": role, "content": "x"}], PLAIN)
    assert message["role"] == ("system" if role == "developer" else role)


def test_a_role_of_the_models_own_is_taken_where_its_template_names_it() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'context' %}{{ m.content }}{% endif %}{% endfor %}", names={}
    )
    assert named_roles([{"role": "context", "content": "x"}], template) == [{"role": "context", "content": "x"}]
    with pytest.raises(BadRequest, match="'context'"):
        named_roles([{"role": "context", "content": "x"}], PLAIN)
