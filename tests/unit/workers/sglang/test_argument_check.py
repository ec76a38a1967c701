"""Names and plain types of SGLang's settings, by a source that is only read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.sglang import argument_check
from headrace.workers.sglang.argument_check import check_arguments, sglang_settings

SOURCES = {
    "memory.py": """
class Memory(msgspec.Struct):
    _NS_PATH = "memory"
    page_size: A[Optional[int], "The size of a page."] = None
    derived = Derived(doc="", default=None)
""",
    "model.py": """
class Model(msgspec.Struct):
    dtype: A[str, Arg(help="The type.", choices=["auto"])] = "auto"
    context_length: A[Optional[int], "The length."] = None
    trust_remote_code: A[bool, "Trust it."] = False
""",
}


def package(folder: Path, sources: dict[str, str]) -> Path:
    (folder / "srt" / "arg_groups" / "fields").mkdir(parents=True)
    for name, text in sources.items():
        (folder / "srt" / "arg_groups" / "fields" / name).write_text(text)
    return folder


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = sglang_settings(package(tmp_path, SOURCES))
    assert found.keys() == {"page_size", "dtype", "context_length", "trust_remote_code"}
    monkeypatch.setattr(argument_check, "sglang_settings", lambda: found)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"contxt_length": 1}, "SGLang has no setting 'contxt_length'; close to it: context_length"),
        ({"derived": 1}, "SGLang has no setting 'derived'"),
        ({"context_length": "4k"}, "SGLang takes a whole number as context_length, not '4k'"),
        ({"trust_remote_code": "yes"}, "SGLang takes true or false as trust_remote_code, not 'yes'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_may_be(args: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineStartFailed) as refused:
        check_arguments(args)
    assert said in str(refused.value)


@pytest.mark.usefixtures("source")
def test_what_the_source_cannot_refuse_passes() -> None:
    check_arguments({"context_length": None, "page_size": 32, "dtype": "whatever SGLang says", "adapters": {}})


@pytest.mark.parametrize("sources", [{}, {"memory.py": "def ("}, {"model.py": SOURCES["model.py"]}])
def test_a_source_that_is_not_as_expected_refuses_nothing(
    sources: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sglang_settings(package(tmp_path, sources)) == {}
    monkeypatch.setattr(argument_check, "sglang_settings", dict)
    check_arguments({"anything": 1})


def test_the_installed_sglang_is_read_and_not_imported() -> None:
    script = (
        "import sys; from importlib.util import find_spec; from headrace.workers.sglang.argument_check import sglang_settings;"
        "found = sglang_settings(); there = find_spec('sglang') is not None;"
        "assert not there or (found['context_length'], found['disable_radix_cache']) == ('Optional[int]', 'bool'), found;"
        "assert not {'sglang', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
