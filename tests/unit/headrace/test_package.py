"""One import package over links to folders: a copy without links and a second import of a folder are refused in a sentence."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "headrace"
LINKED = sorted(link.name for link in PACKAGE.iterdir() if link.is_symlink())


def last_words(folder: Path) -> str:
    ran = subprocess.run(
        [sys.executable, "-S", "-c", "import headrace"],
        cwd=folder,
        env={},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return ran.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize("links", ["files", "missing", "folders"])
def test_a_copy_without_links_names_what_is_wrong_with_it(tmp_path: Path, links: str) -> None:
    copy = tmp_path / "headrace"
    copy.mkdir()
    shutil.copy(PACKAGE / "__init__.py", copy)
    if links == "files":
        (copy / "broker").write_text("../broker")
    elif links == "folders":
        (copy / "broker").mkdir()
    said = last_words(tmp_path)
    if links == "folders":
        assert said == ""
    else:
        assert said.startswith(f"ImportError: {copy / 'broker'} is not a folder: ")
        assert "git clone -c core.symlinks=true" in said


def test_every_folder_of_the_package_is_a_link() -> None:
    assert LINKED == ["broker", "frontend", "jetstream", "router", "tools", "workers"]


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_is_not_imported_a_second_time_under_its_plain_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module(f"headrace.{name}")
    monkeypatch.syspath_prepend(str(PACKAGE.parent))
    with pytest.raises(ImportError, match=f"^{name} is imported as headrace.{name}, or all of it would be there twice$"):
        importlib.import_module(name)
