"""What engines can do is told in words, each ability in one of its own."""

from __future__ import annotations

import ast
import asyncio
import json
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Capabilities, DisaggStyle, EngineConfig, Handover, Role, Sequence, StoredTensor
from headrace.workers.engine_registry import supports
from headrace.workers.errors import EngineError, EngineStartFailed, UnsupportedByEngine
from headrace.workers.kit import (
    CONFIG,
    EngineSupport,
    LoraConfig,
    adapters_of,
    check_plain_types,
    json_as_text,
    parsed_source,
    read_config,
    refuse_undeclared,
    reserve_port,
    unknown_adapter,
    words,
)


def test_each_ability_is_a_word() -> None:
    able = Capabilities(
        roles=frozenset({Role.DECODE}),
        disagg=DisaggStyle.RENDEZVOUS,
        resume=False,
        seeds=False,
        logprobs=True,
        guided=frozenset({"json"}),
        lora="static",
        media=frozenset({"audio"}),
        sleep_levels=(2,),
        operations=frozenset({"stats"}),
    )
    expected = {"role decode", "handover rendezvous", "logprobs", "guided json", "lora static", "media audio"}
    assert words(able, ("chat",)) == expected | {"sleep level 2", "operation stats", "kind chat"}


def test_every_field_of_capabilities_is_told() -> None:
    plain = words(Capabilities(resume=False, seeds=False, roles=frozenset()))
    assert plain == frozenset()
    for name, kind in Capabilities.__annotations__.items():
        some = {"bool": True, "tuple[int, ...]": (1,), "DisaggStyle": DisaggStyle.PARAMS}.get(kind, frozenset({Role.DECODE}))
        given = {"resume": False, "seeds": False, "roles": frozenset(), name: "dynamic" if name == "lora" else some}
        assert words(Capabilities(**given)), name  # type: ignore[arg-type]


def test_conditions_and_reasons_are_for_words_that_the_engine_has() -> None:
    for wrong in ({"conditions": {"fly": "wings"}}, {"untried": {"fly": "no air"}}):
        with pytest.raises(ValueError, match="fly"):
            EngineSupport(name="x", title="x", words=frozenset({"resume"}), **wrong)


def test_engines_have_names_of_their_own() -> None:
    names = [engine.name for engine in supports()]
    assert len(set(names)) == len(names)


ALL = Capabilities(
    disagg=DisaggStyle.PARAMS,
    logprobs=True,
    prompt_logprobs=True,
    guided=frozenset({"json", "regex"}),
    lora="static",
    media=frozenset({"image"}),
    prompt_embeds=True,
    cache_salt=True,
)
NEEDS: list[tuple[str, dict[str, Any]]] = [
    ("seed", {"sampling": Sampling(max_tokens=1, seed=1)}),
    ("logprobs", {"logprobs": 0}),
    ("prompt_logprobs", {"prompt_logprobs": 0}),
    ("json", {"guided": {"json": {}, "disable_any_whitespace": True}}),
    ("adapter", {"adapter": "fr"}),
    ("image", {"media": [{"kind": "image"}]}),
    ("prompt_embeds", {"prompt_embeds": StoredTensor("float32", (1, 1), memoryview(bytes(4)))}),
    ("cache_salt", {"cache_salt": "tenant"}),
    ("decode", {"handover": Handover(kind="decode")}),
]


def sequence(**options: Any) -> Sequence:
    return Sequence(id="a", token_ids=[1], prompt_tokens=1, **{"sampling": Sampling(max_tokens=1)} | options)


@pytest.mark.parametrize(("name", "options"), NEEDS)
def test_each_need_is_refused_by_name_and_passes_where_declared(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedByEngine, match=name) as refused:
        refuse_undeclared(Capabilities(seeds=False), sequence(**options))
    assert refused.value.param in (name, None)
    refuse_undeclared(ALL, sequence(**options))


def test_one_kind_of_several_is_not_enough() -> None:
    with pytest.raises(UnsupportedByEngine, match="grammar"):
        refuse_undeclared(ALL, sequence(guided={"grammar": "root ::= x"}))
    with pytest.raises(UnsupportedByEngine, match="video"):
        refuse_undeclared(ALL, sequence(media=[{"kind": "image"}, {"kind": "video"}]))


def test_a_priority_and_a_seed_at_temperature_zero_are_never_refused() -> None:
    sampling = Sampling(max_tokens=1, temperature=0.0, seed=1)
    refuse_undeclared(Capabilities(seeds=False), sequence(priority=5, session_id="s", sampling=sampling))


def config(adapters: Any, served_name: str = "m") -> EngineConfig:
    return EngineConfig(model="folder", served_name=served_name, args={"adapters": adapters})


def folder(tmp_path: Path, name: str, config: Any) -> str:
    (tmp_path / name).mkdir()
    (tmp_path / name / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path / name)


def record(name: str, folder: str, number: int) -> tuple[str, int, LoraConfig]:
    return name, number, read_config(name, folder)


def test_each_adapter_is_read_with_its_number(tmp_path: Path) -> None:
    given = {"a": folder(tmp_path, "a", {"r": 4}), "b": folder(tmp_path, "b", {"r": 8, "target_modules": "q_proj"})}
    assert adapters_of(config(given), record) == {
        "a": ("a", 1, LoraConfig(4, ())),
        "b": ("b", 2, LoraConfig(8, ("q_proj",))),
    }
    assert adapters_of(config(None), record) == {}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{", "is no adapter's configuration"),
        ({}, "is no adapter's configuration"),
        ([], "is no adapter's configuration"),
        ({"r": 0}, "has rank 0; it must be 1 or more"),
        ({"r": "8"}, "has rank '8'"),
    ],
)
def test_a_configuration_that_says_nothing_stops_the_start(tmp_path: Path, written: Any, words: str) -> None:
    with pytest.raises(EngineStartFailed, match=words):
        adapters_of(config({"a": folder(tmp_path, "a", written)}), record)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a"], "must be a map of names to folders"),
        ({"a": 1}, "'a' must name a folder, got 1"),
        ({"": "x"}, "'' must name a folder"),
        ({"m": "x"}, "'m' is the name of the model itself"),
        ({"a": "/nowhere"}, "'a' is no adapter: cannot read /nowhere/adapter_config.json"),
    ],
)
def test_what_is_no_adapter_stops_the_start(given: Any, words: str) -> None:
    with pytest.raises(EngineStartFailed, match=words):
        adapters_of(config(given), record)


def test_a_rank_above_the_most_names_what_is_possible(tmp_path: Path) -> None:
    path = folder(tmp_path, "a", {"r": 65})
    assert read_config("a", path, most_rank=65).rank == 65
    with pytest.raises(EngineError, match="'a' has rank 65; 1 to 64 are possible"):
        read_config("a", path, most_rank=64)


def test_a_refusal_names_the_adapters_that_there_are() -> None:
    assert "no adapter 'x'; it has: a, b" in str(unknown_adapter("x", ["a", "b"]))
    assert "it has: none" in str(unknown_adapter("x", []))


def test_a_file_of_an_installed_package_is_parsed_and_not_imported() -> None:
    sys.modules.pop("wsgiref.simple_server", None)

    tree = parsed_source("wsgiref", Path("simple_server.py"))

    assert tree is not None
    assert "make_server" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert "wsgiref.simple_server" not in sys.modules


def test_a_file_of_a_given_folder_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "args.py").write_text("class Args: ...")

    tree = parsed_source("no_such_package", Path("args.py"), tmp_path)

    assert tree is not None
    assert isinstance(tree.body[0], ast.ClassDef)


def test_a_package_or_file_that_is_not_there_or_is_no_python_gives_none(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("class :")

    assert parsed_source("no_such_package", Path("args.py")) is None
    assert parsed_source("json", Path("no_such_file.py")) is None
    assert parsed_source("json", Path("broken.py"), tmp_path) is None


KNOWN = {"length": "int", "limit": "Optional[int]", "share": "float | None", "eager": "bool", "dtype": "Literal['a']"}


@pytest.mark.parametrize("args", [{"length": "4k"}, {"limit": "x"}, {"limit": 0.5}, {"share": "all"}, {"eager": "yes"}])
def test_a_value_of_another_type_is_named(args: dict[str, Any]) -> None:
    ((name, value),) = args.items()
    with pytest.raises(EngineStartFailed, match=rf"E takes .* as {name}, not {value!r}"):
        check_plain_types("E", args, KNOWN)


def test_what_fits_and_what_has_no_plain_type_passes() -> None:
    check_plain_types("E", {"length": 4.0, "limit": None, "share": 1, "eager": 0, "dtype": 7, "unknown": "x"}, KNOWN)


def test_an_object_for_a_setting_that_is_text_is_written_as_json() -> None:
    known = {"events": "Optional[str]", "name": "str", "mixed": "Optional[Union[str, Dict]]", "table": "Optional[Dict]"}
    value = {"publisher": "null"}
    given = {"events": value, "name": [1], "mixed": value, "table": value, "unknown": value, "none": None}
    written = {"events": '{"publisher": "null"}', "name": "[1]"}
    assert json_as_text(given, known) == given | written


async def test_a_server_can_listen_on_a_reserved_port() -> None:
    with ExitStack() as stack:
        port = reserve_port(stack, "127.0.0.1", 0)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
        server.close()
        await server.wait_closed()


def test_a_port_on_which_another_listens_cannot_be_reserved() -> None:
    with ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with pytest.raises(OSError, match="in use"):
            reserve_port(stack, "127.0.0.1", taken.getsockname()[1])
