"""A source file of an engine is parsed without importing the engine."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from headrace.workers.engine_source import parsed_source


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
