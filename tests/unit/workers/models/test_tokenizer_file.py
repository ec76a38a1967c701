"""A model's tokenizer as frontends read it: its own file, or one that is written from the engine's tokenizer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from headrace.workers.errors import EngineStartFailed
from headrace.workers.models.tokenizer_file import tokenizer_folder
from headrace.workers.registration import read_card_files
from headrace.workers.sim.answers.tokens import BUNDLED_TOKENIZER

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
