"""Our rendering of chat templates and our token ids are those of transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from broker.cards import ModelCard
from broker.codec import unpack_u32
from frontend.templates import ChatTemplate
from frontend.tokenize import Fit, PromptEncoder
from tests.unit.frontend.test_templates import CASES, CHATML, TALK, TRIMMING

pytestmark = pytest.mark.engine
ASSETS = Path(__file__).parents[2] / "workers" / "assets" / "smollm2"
TEXTS = ["Hello, world!", "  two  spaces\n\nand lines\t", "naïve 💧 日本語", "<|im_start|>user\nhi<|im_end|>", "x" * 3000, ""]


def reference(source: str, messages: Any, **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    extra = options.pop("extra", None) or {}
    texts, _ = render_jinja_template([messages], chat_template=source, **options, **extra)
    return str(texts[0])


@pytest.mark.parametrize(("source", "options", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_stored_texts_are_what_transformers_renders(source: str, options: dict[str, Any], expected: str) -> None:
    assert reference(source, TALK, bos_token="<s>", eos_token="</s>", **options) == expected


@pytest.mark.parametrize("source", [CHATML, TRIMMING])
@pytest.mark.parametrize("content", ["Yo", "Yo ", " Yo\n"])
def test_continued_messages_are_cut_where_transformers_cuts_them(source: str, content: str) -> None:
    messages = [*TALK[:1], {"role": "assistant", "content": content}]
    ours = ChatTemplate(source, names={}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == reference(source, messages, continue_final_message=True)


def test_a_real_template_renders_the_same() -> None:
    source = (ASSETS / "chat_template.jinja").read_text()
    for messages in (TALK, [{"role": "system", "content": "Be brief."}, *TALK]):
        for prompt in (True, False):
            ours = ChatTemplate(source, names={}).render(messages, add_generation_prompt=prompt)
            assert ours == reference(source, messages, add_generation_prompt=prompt)


@pytest.mark.parametrize("special", [True, False])
def test_token_ids_are_those_of_transformers(special: bool) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(ASSETS)
    card = ModelCard(model="m", pool="m-0", context_length=100_000, block_size=0)
    with ThreadPoolExecutor(1) as pool:
        ours = PromptEncoder((ASSETS / "tokenizer.json").read_bytes(), card, executor=pool, inline_bytes=8192)
        fit = Fit(context_length=100_000, wanted=1, truncate=None, param="prompt")
        for text in filter(None, TEXTS):
            ids = unpack_u32(ours.encode_now(text, add_special_tokens=special, fit=fit).packed)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
