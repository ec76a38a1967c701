"""What transformers renders: used to write the expected texts, and to hold them against the installed version."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tests.support.chat_templates.cases import Conversation, Family, FrozenTime


def rendered(family: Family, conversation: Conversation) -> dict[str, str]:
    """{"text": …}, or {"refused": …} with the words of a template that raises, or {"failed": kind} for other errors."""
    import jinja2
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **family.special_tokens)
    options: dict[str, Any] = {
        "tools": conversation.tools,
        "documents": conversation.documents,
        "add_generation_prompt": conversation.add_generation_prompt,
        "continue_final_message": conversation.continue_final_message,
        **conversation.kwargs,
    }
    with patch("transformers.utils.chat_template_utils.datetime", FrozenTime):
        try:
            text = tokenizer.apply_chat_template(conversation.messages, chat_template=family.source, tokenize=False, **options)
        except jinja2.TemplateError as error:
            return {"refused": str(error)}
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            return {"failed": type(error).__name__}
    return {"text": str(text)}
