"""Blocks of one model are never those of another: whatever changes a model's numbers changes its identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm import embeddings
from headrace.workers.vllm.embeddings import (
    SAMPLE,
    Embeddings,
    ItemFolder,
    LentItems,
    UnusableEmbeddings,
    encoder_word,
    hands_over_embeddings,
    model_files,
    model_identity,
    namespace,
    pack,
    settings_identity,
    transfer_config,
    unpack,
)


def weights(path: Path, **tensors: bytes) -> None:
    """Write a safetensors file."""
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, data in tensors.items():
        head[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights(tmp_path / "model.safetensors", first=b"1" * (2 * SAMPLE), second=b"2" * 100)
    (tmp_path / "config.json").write_text('{"rope_theta": 10000}')
    (tmp_path / "README.md").write_text("a model")
    return tmp_path


def test_the_same_files_are_the_same_model_wherever_they_lie(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert model_identity(copy) == model_identity(model)


@pytest.mark.parametrize("change", ["first tensor", "second tensor", "config", "more weights", "other form"])
def test_what_changes_the_numbers_is_another_model(model: Path, change: str) -> None:
    before = model_identity(model)
    match change:
        case "first tensor":
            weights(model / "model.safetensors", first=b"0" + b"1" * (2 * SAMPLE - 1), second=b"2" * 100)
        case "second tensor":
            weights(model / "model.safetensors", first=b"1" * (2 * SAMPLE), second=b"2" * 99 + b"3")
        case "config":
            (model / "config.json").write_text('{"rope_theta": 10001}')
        case "more weights":
            weights(model / "model-2.safetensors", third=b"3")
        case _:
            (model / "adapter.bin").write_bytes(b"x")
    assert model_identity(model) != before


def test_a_model_may_be_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"weights")
    (tmp_path / "b.gguf").write_bytes(b"others")
    assert model_identity(tmp_path / "a.gguf") != model_identity(tmp_path / "b.gguf")


def test_a_model_of_a_hub_is_its_snapshot_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def cached(model: str, name: str, revision: str | None) -> str | None:
        return f"{tmp_path}/{revision}/{name}" if model == "org/there" else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    assert model_files(str(tmp_path), None) == tmp_path
    assert model_files("org/there", "v1") == tmp_path / "v1"
    with pytest.raises(EngineStartFailed, match="the files of org/absent are not on this machine"):
        model_files("org/absent", None)


def test_a_readme_is_no_part_of_the_model(model: Path) -> None:
    before = model_identity(model)
    (model / "README.md").write_text("the same model")
    assert model_identity(model) == before


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineStartFailed, match="has no weights"):
        model_identity(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, (3).to_bytes(8, "little") + b"{x}", (2).to_bytes(8, "little") + b"[]", b"\x01"]
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineStartFailed, match=r"model\.safetensors"):
        model_identity(tmp_path)


def test_a_setting_that_may_change_embeddings_is_in_the_identity_and_one_that_cannot_is_not() -> None:
    plain = settings_identity({"dtype": "float32"})
    assert settings_identity({"dtype": "float32", "max_num_seqs": 3, "seed": 2}, without=("seed",)) == plain
    assert settings_identity({"dtype": "bfloat16"}) != plain
    assert settings_identity({"dtype": "float32", "a_setting_to_come": 1}) != plain


def test_every_part_is_in_the_namespace() -> None:
    assert namespace("a", 1) != namespace("a", 2)
    assert namespace("ab", "c") != namespace("a", "bc")
    assert len(namespace("a")) == 24


def config(role: Role = Role.AGGREGATED, model: str = "m", **args: Any) -> EngineConfig:
    return EngineConfig(model=model, served_name="m", role=role, args=args)


def test_embeddings_pass_where_they_are_asked_for() -> None:
    assert hands_over_embeddings(config(encoders=True))
    assert hands_over_embeddings(config(Role.DECODE, encoders=True))
    assert hands_over_embeddings(config(Role.ENCODE))
    assert not hands_over_embeddings(config())
    assert not hands_over_embeddings(config(encoders=False))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (config(encoders="yes"), "encoders is true or false, not 'yes'"),
        (config(Role.ENCODE, encoders=True), "role 'encode' is an encoder"),
        (config(encoders=True, ec_transfer_config={}), "ec_transfer_config"),
        (config(Role.ENCODE, ec_transfer_config={}), "ec_transfer_config"),
        (config(encoders=True, nnodes=2), "several machines"),
        (config(Role.ENCODE, node_rank=1), "several machines"),
        (config(Role.ENCODE, kv_transfer_mode="push"), "kv_transfer_mode"),
        (config(Role.ENCODE, kv_offloading_size=1), "kv_offloading_size"),
        (config(Role.ENCODE, enable_lora=True), "enable_lora"),
    ],
)
def test_settings_that_contradict_each_other_are_named(given: EngineConfig, told: str) -> None:
    with pytest.raises(EngineStartFailed, match=told):
        hands_over_embeddings(given)


def test_an_encode_worker_writes_what_the_others_read() -> None:
    made = [transfer_config(role, Path("/f")) for role in (Role.ENCODE, Role.AGGREGATED, Role.DECODE)]
    assert [one["ec_role"] for one in made] == ["ec_producer", "ec_consumer", "ec_consumer"]
    assert {one["ec_connector_extra_config"]["folder"] for one in made} == {"/f"}


def test_engines_have_equal_words_if_they_make_equal_embeddings(tmp_path: Path) -> None:
    def word(weights: bytes = b"W" * 8, *, dtype: str = "float32", version: str = "1", device: str = "cpu", **args: Any) -> str:
        (tmp_path / "model.bin").write_bytes(weights)
        return encoder_word(config(model=str(tmp_path), **args), version=version, dtype=dtype, device=device)

    same = word()
    assert word(encoders=True, max_model_len=9, kv_transfer_mode="push", max_num_seqs=3, dtype_="x") != same
    assert word(encoders=True, max_model_len=9, kv_transfer_mode="push", max_num_seqs=3) == same
    others = [
        word(b"V" * 8),
        word(dtype="bfloat16"),
        word(version="2"),
        word(device="cuda"),
        word(quantization="fp8"),
        word(mm_processor_kwargs={"size": 1}),
    ]
    assert len({same, *others}) == 1 + len(others)


def files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_an_item_is_there_until_the_last_sequence_that_needs_it_has_ended(tmp_path: Path) -> None:
    lent = LentItems(tmp_path / "items")
    core = ItemFolder(tmp_path / "items")
    lent.lend("one", {"a": b"A", "b": b"B"})
    lent.lend("two", {"a": b"A"})
    assert (core.read("a"), core.read("b")) == (b"A", b"B")
    lent.end("one")
    assert (core.read("a"), core.read("b")) == (b"A", None)
    lent.end("two")
    lent.end("two")
    lent.end("never")
    assert files(tmp_path / "items") == set()


def test_what_the_core_has_written_is_taken_once(tmp_path: Path) -> None:
    lent = LentItems(tmp_path / "items")
    ItemFolder(tmp_path / "items").write("a", b"A")
    assert lent.take("a") == b"A"
    assert lent.take("a") is None
    assert files(tmp_path / "items") == set()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".a", "x" * 129, "fr:abc"])
def test_no_name_reaches_out_of_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "up").write_bytes(b"other")
    lent = LentItems(tmp_path / "items")
    folder = ItemFolder(tmp_path / "items")
    assert folder.read(name) is None
    folder.remove(name)
    with pytest.raises(OSError, match="no name of an item"):
        folder.write(name, b"x")
    with pytest.raises(OSError, match="no name"):
        lent.lend("one", {"good": b"G", name: b"x"})
    assert files(tmp_path / "items") == set()
    assert (tmp_path / "up").read_bytes() == b"other"


def test_nobody_else_of_the_machine_may_look_into_the_folder(tmp_path: Path) -> None:
    LentItems(tmp_path / "items")
    assert (tmp_path / "items").stat().st_mode & 0o077 == 0


SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


@given(st.integers(1, 5), st.integers(1, 7), st.sampled_from(sorted(SIZES)), st.data())
def test_embeddings_come_back_as_they_were(rows: int, width: int, dtype: str, draw: st.DataObject) -> None:
    size = rows * width * SIZES[dtype]
    data = draw.draw(st.binary(min_size=size, max_size=size))
    made = unpack(pack(Embeddings(rows, width, dtype, data)))
    assert (made.rows, made.width, made.dtype, bytes(made.data)) == (rows, width, dtype, data)


@given(st.binary(max_size=60))
def test_what_is_no_record_is_refused(garbage: bytes) -> None:
    with pytest.raises(UnusableEmbeddings):
        unpack(garbage)


@pytest.mark.parametrize("change", [-1, 1, -16])
def test_a_record_with_too_few_or_too_many_bytes_is_refused(change: int) -> None:
    record = pack(Embeddings(2, 3, "float32", bytes(24)))
    with pytest.raises(UnusableEmbeddings):
        unpack(record[:change] if change < 0 else record + bytes(change))


def test_a_type_of_numbers_that_no_record_has_is_named() -> None:
    with pytest.raises(UnusableEmbeddings, match=r"'int8'.*float32"):
        pack(Embeddings(1, 1, "int8", b"1"))


def test_what_is_too_large_or_empty_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MOST_BYTES", 40)
    pack(Embeddings(5, 2, "float32", bytes(40)))
    for rows, width in ((11, 1), (0, 4), (4, 0)):
        with pytest.raises(UnusableEmbeddings, match=f"{rows} rows of {width}"):
            pack(Embeddings(rows, width, "float32", bytes(rows * width * 4)))
