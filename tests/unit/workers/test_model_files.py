"""An operator's chat template: tried at the start, and put in the place of the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from headrace.workers.errors import EngineStartFailed
from headrace.workers.model_files import MOST_BYTES, read_template, tokenizer_folder, weight_format
from headrace.workers.registration import build_card, read_card_files
from headrace.workers.settings import WorkerSettings
from headrace.workers.sim.tokens import BUNDLED_TOKENIZER
from tests.unit.workers.test_workers_registration import INFO

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


TEXT = "Routing by prefixes, \N{LATIN SMALL LETTER E WITH ACUTE}t\N{LATIN SMALL LETTER E WITH ACUTE} 42!"


@pytest.fixture
def own() -> SimpleNamespace:
    """As transformers has it for a vocabulary that it could read."""
    return SimpleNamespace(backend_tokenizer=Tokenizer.from_file(str(Path(BUNDLED_TOKENIZER) / "tokenizer.json")))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_the_file_of_the_model_is_used_where_there_is_one(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert tokenizer_folder(str(model), None, lambda: pytest.fail("not needed"), environ=environ) == model
    assert not (tmp_path / "cache").exists()


def test_the_engines_tokenizer_is_written_with_the_templates_of_the_model(
    model: Path, own: SimpleNamespace, tmp_path: Path
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    folder = tokenizer_folder(str(model), None, lambda: own, environ=environ)
    written = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert written.encode(TEXT).ids == own.backend_tokenizer.encode(TEXT).ids
    files = read_card_files(str(folder))
    assert files.keys() == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/rag.jinja",
    }
    assert files["tokenizer_config.json"] == b'{"eos_token": "<end>"}'
    assert not (model / "tokenizer.json").exists(), "the model's folder stays as it is"
    assert (tmp_path / "cache" / "headrace" / "tokenizers").stat().st_mode & 0o077 == 0


def test_the_same_tokenizer_is_written_once_and_another_template_makes_another(
    model: Path, own: SimpleNamespace, tmp_path: Path
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = tokenizer_folder(str(model), None, lambda: own, environ=environ)
    before = (first / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer_folder(str(model), None, lambda: own, environ=environ) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == before
    (model / "chat_template.jinja").write_text("{{ other }}")
    assert tokenizer_folder(str(model), None, lambda: own, environ=environ) != first
    assert len(list((tmp_path / "cache" / "headrace" / "tokenizers").iterdir())) == 2, "nothing half is left"


@pytest.mark.parametrize("own", [None, SimpleNamespace()])
def test_a_tokenizer_of_another_library_is_refused_by_name(model: Path, own: object, tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(EngineStartFailed, match=rf"has no tokenizer\.json.*\({type(own).__name__}\) cannot be written"):
        tokenizer_folder(str(model), None, lambda: own, environ=environ)


def test_a_cache_that_cannot_be_written_is_named(model: Path, own: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(EngineStartFailed, match=r"one cannot be written: .*cache"):
        tokenizer_folder(str(model), None, lambda: own, environ={"XDG_CACHE_HOME": str(tmp_path / "cache")})


SAFE = {"load_format": "safetensors"}


def folder(path: Path, *names: str) -> str:
    for name in ("config.json", *names):
        (path / name).write_bytes(b"")
    return str(path)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth", "x.ckpt"])
def test_a_folder_of_pickles_is_refused(tmp_path: Path, pickle: str) -> None:
    model = folder(tmp_path, pickle)
    with pytest.raises(EngineStartFailed, match=f"pickles .{pickle}.*load_format=auto"):
        weight_format(model, {})
    assert weight_format(model, {"load_format": "auto"}) == {}


def test_pickles_beside_safetensors_are_not_read(tmp_path: Path) -> None:
    assert weight_format(folder(tmp_path, "model.safetensors", "pytorch_model.bin"), {}) == SAFE


def test_an_engine_fetches_safetensors_only_from_a_hub() -> None:
    assert weight_format("Qwen/Qwen3-0.6B", {}) == SAFE
    assert weight_format("Qwen/Qwen3-0.6B", {"load_format": None}) == SAFE
    assert weight_format("Qwen/Qwen3-0.6B", {"load_format": "dummy"}) == {}


def test_mistrals_own_files_are_read_as_such(tmp_path: Path) -> None:
    assert weight_format(folder(tmp_path, "consolidated.safetensors"), {}) == {"load_format": "mistral"}


def test_gguf_is_left_to_the_engine(tmp_path: Path) -> None:
    assert weight_format(folder(tmp_path, "model.gguf"), {}) == {}
    assert weight_format(str(tmp_path / "model.gguf"), {}) == {}
    assert weight_format("org/model:Q4_K_M", {}) == {}
    assert weight_format("s3://bucket/model", {}) == {}


def test_a_folder_without_weights_is_left_to_the_engine_which_names_what_is_missing(tmp_path: Path) -> None:
    assert weight_format(folder(tmp_path), {}) == SAFE
