"""Values of plain types, told by annotations alone."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.plain_types import check_plain_types, json_as_text

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
