"""What the adapter uses of TensorRT-LLM, compared with what is installed."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.trtllm.contract import (
    USED,
    Used,
    check_package,
    differences,
    load_installed,
    missing_here,
    release_line,
    takes,
)
from tests.support import tensorrt_llm_stand_in as stand_in


@pytest.mark.parametrize("version", stand_in.VERSIONS)
def test_the_stand_in_has_all_that_is_used(version: str) -> None:
    with stand_in.installed(version):
        assert differences() == []
        installed = load_installed()
        assert (installed.version, installed.line) == (version, version[:3])
        assert installed.priority == (version == stand_in.V1_3)


@pytest.mark.parametrize("used", USED, ids=lambda used: used.label)
def test_each_missing_object_is_one_sentence(used: Used) -> None:
    def load(name: str) -> Any:
        module = importlib.import_module(name)
        if name == used.module and "." not in used.path:
            return type("Module", (), {one: getattr(module, one) for one in dir(module) if one != used.path})
        return module

    with stand_in.installed():
        if "." in used.path:
            return
        told = differences((used,), load)
        assert told == [f"{used.label} does not exist."]


def test_missing_arguments_fields_and_members_are_named() -> None:
    @dataclasses.dataclass
    class Record:
        here: int = 0

    class Model:
        model_fields = {"here": 1}

        def call(self, here: int) -> None: ...

    module = type("Module", (), {"Record": Record, "Model": Model})
    used = (
        Used("m", "Record", "fields", ("here", "gone")),
        Used("m", "Model", "fields", ("here", "gone")),
        Used("m", "Model.call", "arguments", ("here", "gone")),
        Used("m", "Model", "members", ("call", "gone")),
    )
    assert differences(used, lambda _: module) == [
        "m.Record has no field 'gone'.",
        "m.Model has no field 'gone'.",
        "m.Model.call has no argument 'gone'.",
        "m.Model has no member 'gone'.",
    ]
    assert takes(Model.call, "here")
    assert not takes(Model.call, "gone")
    assert not takes(int.__add__, "gone")


def test_a_module_that_is_gone_is_one_sentence() -> None:
    (told,) = differences((Used("no_such_module_here", "Thing", "members", ()),))
    assert told.startswith("the module no_such_module_here cannot be imported")


def test_a_package_that_differs_ends_the_start_with_all_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in.installed():
        import tensorrt_llm.llmapi as api

        monkeypatch.setattr(api, "KvCacheConfig", type("KvCacheConfig", (), {"model_fields": {"max_tokens": None}}))
        monkeypatch.delattr(api, "RequestError")
        with pytest.raises(EngineStartFailed) as caught:
            load_installed()
    told = str(caught.value)
    assert told.startswith(f"TensorRT-LLM {stand_in.V1_3} differs from the API that Headrace uses (written for 1.2 and 1.3): ")
    assert "tensorrt_llm.llmapi.KvCacheConfig has no field 'tokens_per_block'." in told
    assert "tensorrt_llm.llmapi.RequestError does not exist." in told


def test_a_package_that_cannot_be_imported_is_told_with_what_the_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("raise OSError('libnvinfer.so.10: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineStartFailed, match=r"cannot be imported \(OSError: libnvinfer"):
        load_installed()


def test_what_the_machine_lacks_is_listed() -> None:
    def no_library(name: str) -> None:
        raise OSError(name)

    told = missing_here({"PATH": "/nowhere"}, library=no_library)
    assert [sentence.split("(")[0].strip() for sentence in told] == [
        "There is no NVIDIA driver",
        "There is no CUDA driver library",
        "The Python package tensorrt_llm is not installed.",
    ]
    with stand_in.installed():
        assert missing_here({"PATH": "/nowhere"}, library=lambda _: None) == [told[0]]
        check_package()


def test_release_lines() -> None:
    assert [release_line(version) for version in ("1.2.1", "1.3.0rc24", "2.0")] == ["1.2", "1.3", "2.0"]
