"""Our rendering of chat templates and our token ids are those of transformers."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.codec import unpack_u32
from headrace.broker.models.cards import ModelCard
from headrace.frontend.prompts.model_cache import ModelFiles
from headrace.frontend.prompts.prompt_encoder import LengthLimit, PromptCache, PromptEncoder
from headrace.frontend.prompts.templates import ChatTemplate
from tests.support.chat_templates.cases import BUNDLED, conversations, load, names
from tests.support.chat_templates.reference import rendered
from tests.support.frontend.tokenizers import MAKES, make
from tests.unit.frontend.prompts.test_prompts_templates import CASES, CHATML, TALK, TRIMMING

pytestmark = pytest.mark.engine
TEXTS = ["Hello, world!", "  two  spaces\n\nand lines\t", "naïve 💧 日本語", "<|im_start|>user\nhi<|im_end|>", "x" * 3000]
CARD = ModelCard(model="m", pool="m-0", context_length=1_000_000, block_size=0)
LIMIT = LengthLimit(context_length=1_000_000, wanted=1, truncate=None, param="prompt")
MORE = "HEADRACE_TOKENIZERS"  # a folder with one folder per tokenizer, to hold more of them against transformers


def reference(source: str, messages: Any, **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    extra = options.pop("extra", None) or {}
    texts, _ = render_jinja_template([messages], chat_template=source, **options, **extra)
    return str(texts[0])


@pytest.mark.parametrize(("source", "options", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_stored_texts_are_what_transformers_renders(source: str, options: dict[str, Any], expected: str) -> None:
    assert reference(source, TALK, bos_token="<s>", eos_token="</s>", **options) == expected


@pytest.mark.parametrize("name", names())
def test_the_stored_texts_of_families_are_what_transformers_renders(name: str) -> None:
    family = load(name)
    assert {conversation.name: rendered(family, conversation) for conversation in conversations()} == family.expected


@pytest.mark.filterwarnings("ignore")  # vLLM's imports warn
@pytest.mark.parametrize("name", names())
def test_the_form_of_contents_is_the_one_vllm_finds(name: str) -> None:
    from vllm.renderers.hf import _detect_content_format

    family = load(name)
    parts = ChatTemplate(family.source, names={}).takes_parts(tools=False)
    assert parts is (_detect_content_format(family.source, default="string") == "openai")


@pytest.mark.parametrize("source", [CHATML, TRIMMING])
@pytest.mark.parametrize("content", ["Yo", "Yo ", " Yo\n"])
def test_continued_messages_are_cut_where_transformers_cuts_them(source: str, content: str) -> None:
    messages = [*TALK[:1], {"role": "assistant", "content": content}]
    ours = ChatTemplate(source, names={}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == reference(source, messages, continue_final_message=True)


# -- token ids -----------------------------------------------------------------------------------------------


def _folders() -> dict[str, Path | None]:
    """Tokenizers by name; None = made by the tests."""
    more = sorted(Path(os.environ[MORE]).iterdir()) if MORE in os.environ else []
    made = [name for name in MAKES if name != "SmolLM2"]
    return {"bundled": BUNDLED, **dict.fromkeys(made), **{folder.name: folder for folder in more}}


FOLDERS = _folders()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for every tokenizer, with a configuration that names its special tokens and wants a BOS."""
    found: dict[str, Path] = {}
    for name, folder in FOLDERS.items():
        if folder is None:
            folder = tmp_path_factory.mktemp("tokenizer")
            (folder / "tokenizer.json").write_bytes(make(name))
            config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "add_bos_token": True,
                "chat_template": [
                    {"name": "default", "template": "{{ bos_token }}" + CHATML},
                    {"name": "tool_use", "template": "{{ tools | tojson }}" + CHATML},
                ],
            }
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        found[name] = folder
    return found


@cache
def both(folder: Path) -> tuple[Any, PromptEncoder, PromptEncoder, ModelFiles]:
    """Theirs, ours, ours with a memory, and the files."""
    from transformers import AutoTokenizer

    files = ModelFiles.read({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}, folder.name)
    pool = ThreadPoolExecutor(1)
    ours, remembering = (
        PromptEncoder(files.tokenizer, CARD, executor=pool, inline_bytes=0, cache=cache, special_tokens=files.special_tokens)
        for cache in (None, PromptCache(1 << 22))
    )
    return AutoTokenizer.from_pretrained(folder), ours, remembering, files


def ids_of(encoder: PromptEncoder, text: str, *, special: bool) -> list[int]:
    return unpack_u32(encoder.encode_now(text, add_special_tokens=special, limit=LIMIT).packed)


@pytest.mark.parametrize("name", FOLDERS)
@settings(deadline=None)  # the first example loads the tokenizer
@given(
    text=st.lists(
        st.sampled_from([*TEXTS, "<s>", "</s>", "<|im_end|>", " ", "\n"]) | st.text(max_size=20), min_size=1, max_size=6
    ).map("".join),
    special=st.booleans(),
)
def test_token_ids_are_those_of_transformers(made: dict[str, Path], name: str, text: str, special: bool) -> None:
    theirs, ours, remembering, _ = both(made[name])
    expected = theirs(text, add_special_tokens=special, truncation=False)["input_ids"]
    if expected:
        assert ids_of(ours, text, special=special) == ids_of(remembering, text, special=special) == expected


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_of_conversations_are_those_of_transformers(made: dict[str, Path], name: str) -> None:
    theirs, ours, remembering, files = both(made[name])
    if not files.templates:
        pytest.skip("this tokenizer has no chat template")
    template = ChatTemplate(files.templates, names=files.names)
    for tools in (None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
        for count in range(1, len(TALK) + 1):
            messages = TALK[:count]
            text = template.render(messages, tools=tools)
            expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
            assert ids_of(ours, text, special=False) == ids_of(remembering, text, special=False) == expected


@pytest.mark.parametrize("name", FOLDERS)
def test_special_tokens_have_the_names_transformers_gives_them(made: dict[str, Path], name: str) -> None:
    theirs, _, _, files = both(made[name])
    assert files.names.items() <= theirs.special_tokens_map.items()
