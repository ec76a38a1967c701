"""What an engine may read of an adapter: safetensors and a LoRA configuration; everything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers import adapter_source
from headrace.workers.adapter_source import (
    AdapterSource,
    AllowedSources,
    check_adapter_folder,
    check_adapter_name,
    parse_source,
)
from headrace.workers.errors import AdapterFilesError
from tests.support.adapter_folders import adapter_folder, safetensors


def refused(folder: Path) -> str:
    with pytest.raises(AdapterFilesError) as told:
        check_adapter_folder(folder)
    return str(told.value)


def test_an_adapter_is_fine(tmp_path: Path) -> None:
    check_adapter_folder(adapter_folder(tmp_path / "a"))


@pytest.mark.parametrize("name", ["adapter_model.bin", "optimizer.pt", "rng_state.pth", "x.pkl", "modeling.py"])
def test_files_that_may_run_code_are_refused(tmp_path: Path, name: str) -> None:
    (adapter_folder(tmp_path) / name).write_bytes(b"")
    assert f"{name} may hold code" in refused(tmp_path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "peft_type is None"),
        (b'{"peft_type": "IA3"}', "'IA3'"),
        (b" " * (adapter_source.MOST_CONFIG + 1), "more than"),
    ],
)
def test_a_configuration_of_something_else_is_refused(tmp_path: Path, config: bytes, why: str) -> None:
    assert why in refused(adapter_folder(tmp_path, config=config))


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"\x80\x04]\x94.",  # a pickle
        (2**63).to_bytes(8, "little") + b"{}",
        (9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        safetensors(data_offsets=[0, 9]),
        safetensors(data_offsets=[-1, 8]),
        safetensors(data_offsets=[8, 0]),
        safetensors(data_offsets=None),
    ],
)
def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path, weights: bytes) -> None:
    assert "is no safetensors file" in refused(adapter_folder(tmp_path, weights=weights))


@given(st.binary(max_size=64))
def test_no_bytes_are_taken_for_weights_by_accident(tmp_path_factory: pytest.TempPathFactory, weights: bytes) -> None:
    refused(adapter_folder(tmp_path_factory.mktemp("a"), weights=weights + b"x"))


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "there is no folder" in refused(tmp_path / "nothing")
    folder = adapter_folder(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors: No such file" in refused(folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json: No such file" in refused(folder)


DIGEST = "0123456789abcdef" * 4
WEB = f"https://models.example/a/sql.tar.gz#sha256={DIGEST}"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("/adapters/sql", AdapterSource("folder", "/adapters/sql")),
        ("sql", AdapterSource("folder", "sql")),
        ("file:///adapters/my%20sql", AdapterSource("folder", "/adapters/my sql")),
        ("store://sql", AdapterSource("store", "sql")),
        ("hf://org/sql", AdapterSource("hf", "org/sql")),
        ("hf://org/sql@v1.2", AdapterSource("hf", "org/sql", revision="v1.2")),
        ("s3://bucket/a/sql/", AdapterSource("s3", "bucket/a/sql")),
        (WEB, AdapterSource("https", "https://models.example/a/sql.tar.gz", sha256=DIGEST)),
    ],
)
def test_each_form_is_understood(text: str, source: AdapterSource) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("ftp://host/a", "begins with 'ftp'"),
        ("folder:///a", "begins with 'folder'"),
        ("file://other/adapters/sql", "another machine"),
        ("store://a/b", "letters, digits"),
        ("store://", "letters, digits"),
        ("hf://sql", "organisation/name"),
        ("hf://org/sql@", "organisation/name"),
        ("hf://org/sql/more", "organisation/name"),
        ("s3://bucket", "s3://bucket/prefix"),
        ("s3://Bucket/a", "s3://bucket/prefix"),
        ("s3://bucket/a/../b", "'..'"),
        ("https://models.example/sql.tar", "#sha256="),
        (f"https://models.example/a/%2e%2e/b.tar#sha256={DIGEST}", "'..'"),
        (f"https://user:secret@models.example/b.tar#sha256={DIGEST}", "no user or password"),
        (f"https:///b.tar#sha256={DIGEST}", "needs a host"),
    ],
)
def test_a_source_that_is_none_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(AdapterFilesError, match=why.replace("(", "\\(")):
        parse_source(text)


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(AdapterFilesError) as told:
        parse_source(f"https://user:secret@models.example/b.tar#sha256={DIGEST}")
    assert "secret" not in str(told.value)


@given(st.text())
def test_every_text_is_a_source_or_refused(text: str) -> None:
    try:
        source = parse_source(text)
    except AdapterFilesError:
        return
    assert source.place


@pytest.mark.parametrize(
    ("rules", "text", "fine"),
    [
        (["folder"], "/adapters/sql", True),
        (["folder"], "store://sql", False),
        (["hf"], "hf://org/sql", True),
        (["hf://org"], "hf://org/sql@v1", True),
        (["hf://org/"], "hf://org/sql", True),
        (["hf://org"], "hf://organisation/sql", False),
        (["hf://org/sql"], "hf://org/sql", True),
        (["s3://bucket/a"], "s3://bucket/a/sql", True),
        (["s3://bucket/a"], "s3://bucket/ab/sql", False),
        (["https://models.example/a/"], WEB, True),
        (["https://models.example/b/"], WEB, False),
        (["http"], WEB, False),
        (["/adapters"], "/adapters/sql", True),
        (["/adapters"], "/adapters/../etc", False),
        (["/adapters"], "/adapters2/sql", False),
        ([], "/adapters/sql", False),
    ],
)
def test_rules_allow_kinds_and_what_lies_below_places(rules: list[str], text: str, fine: bool) -> None:
    allowed, source = AllowedSources(rules), parse_source(text)
    if fine:
        allowed.check(source)
        return
    with pytest.raises(AdapterFilesError, match="not allowed here"):
        allowed.check(source)


def test_a_link_out_of_an_allowed_folder_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    with pytest.raises(AdapterFilesError, match="not allowed"):
        AllowedSources([str(inside)]).check(parse_source(str(inside / "link")))


@pytest.mark.parametrize("rule", ["ftp", "ftp://host", "adapters", "folder:///adapters"])
def test_a_rule_that_means_nothing_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match="adapter_sources"):
        AllowedSources([rule])


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "a b", "ä", "x" * 129])
def test_a_name_that_no_source_could_name_is_not_pushed(name: str) -> None:
    with pytest.raises(AdapterFilesError, match="letters, digits"):
        check_adapter_name(name)
