"""An operator's chat template: tried at the start, and put in the place of the model's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.models.chat_template import MOST_BYTES, read_template
from headrace.workers.registration import build_card, read_card_files
from headrace.workers.settings import WorkerSettings
from tests.unit.workers.test_registration import INFO

PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "own.jinja"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    "template",
    [
        PLAIN,
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        "{% if tools %}{{ raise_exception('none') }}{% endif %}{{ messages[0].content }}{{ strftime_now('%Y') }}",
    ],
)
def test_a_template_that_renders_a_chat_is_taken(tmp_path: Path, template: str) -> None:
    assert read_template(write(tmp_path, template)) == template.encode()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}", "does not compile"),
        ("hello", "leaves the message out"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages.nothing.there }}", "UndefinedError"),
        ("{{ messages.__class__.__mro__ }}", "cannot render"),
        (b"\xff", "not UTF-8"),
        (" " * (MOST_BYTES + 1), "are the most"),
    ],
)
def test_one_that_does_not_stops_the_start_and_says_why(tmp_path: Path, template: str | bytes, says: str) -> None:
    with pytest.raises(EngineStartFailed, match=says):
        read_template(write(tmp_path, template))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineStartFailed, match=r"/nowhere/own\.jinja cannot be read"):
        read_template("/nowhere/own.jinja")


def test_it_takes_the_place_of_all_of_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.json").write_text("{}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "y"}))
    assert set(read_card_files(str(tmp_path), template=PLAIN.encode())) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert "additional_chat_templates/tool_use.jinja" in read_card_files(str(tmp_path))


def kinds(*endpoints: str, template: bool = True) -> list[str]:
    files = {"chat_template.jinja": PLAIN.encode()} if template else {}
    return build_card(WorkerSettings(engine="sim", model="m", endpoints=endpoints), "m", INFO, files).kinds


def test_endpoints_are_those_that_the_operator_chose() -> None:
    assert kinds() == ["chat", "completion"]
    assert kinds("completion") == ["completion"]
    assert kinds("completion", "chat") == ["chat", "completion"]


def test_endpoints_that_the_model_does_not_have_stop_the_start() -> None:
    with pytest.raises(EngineStartFailed, match="serves chat, completion, not 'embedding'"):
        kinds("embedding")
    with pytest.raises(EngineStartFailed, match="not 'chat'"):
        kinds("chat", template=False)
    with pytest.raises(ValueError, match="'speech' is none of"):
        WorkerSettings(engine="sim", model="m", endpoints=("speech",))
