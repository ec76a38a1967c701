"""The templates of many model families render as transformers renders them; tests/engines holds the stored texts against it."""

from __future__ import annotations

from functools import cache

import pytest

from headrace.frontend.errors import BadRequest
from headrace.frontend.prompts.templates import ChatTemplate
from tests.support.chat_templates.cases import Conversation, Family, FrozenTime, conversations, load, names

FAMILIES = {name: load(name) for name in names()}
CONVERSATIONS = conversations()


@cache
def compiled(name: str) -> ChatTemplate:
    return ChatTemplate(FAMILIES[name].source, names=FAMILIES[name].special_tokens)


def ours(family: Family, conversation: Conversation) -> str:
    return compiled(family.name).render(
        conversation.messages,
        tools=conversation.tools,
        documents=conversation.documents,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        extra=conversation.kwargs,
    )


def test_there_are_enough_families_and_every_one_has_its_texts() -> None:
    assert len(FAMILIES) >= 18
    for family in FAMILIES.values():
        assert set(family.expected) == {conversation.name for conversation in CONVERSATIONS}
        assert sum("text" in result for result in family.expected.values()) >= 15


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation.name)
def test_a_family_renders_as_transformers_renders_it(
    family: Family, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.frontend.prompts.templates.datetime", FrozenTime)
    expected = family.expected[conversation.name]
    if "text" in expected:
        assert ours(family, conversation) == expected["text"]
        return
    with pytest.raises(BadRequest) as caught:
        ours(family, conversation)
    assert expected.get("refused", "") in str(caught.value)
    assert caught.value.code == "template_error"
