"""Builds the JSON schema of an answer that must call a tool, for workers without a parser of the model's own call format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.broker.messages import Parsing
from headrace.workers.errors import RequestInvalid
from headrace.workers.parsing.interface import named_function

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def forced_schema(parsing: Parsing) -> dict[str, Any] | None:
    """Return the schema of the named function's arguments, or for `required` of a list of calls; None if no call is forced.

    Raises RequestInvalid for a function name that no tool has.
    """
    name = named_function(parsing)
    functions = [tool["function"] for tool in parsing.tools if tool.get("type") == "function"]
    if name is not None:
        for function in functions:
            if function["name"] == name:
                return dict(function.get("parameters") or _NOTHING)
        raise RequestInvalid(f"tool_choice names the function {name!r}, which is not among the tools", param="tool_choice")
    if parsing.choice != "required":
        return None
    if not functions:
        raise RequestInvalid("tool_choice is required, and there are no functions among the tools", param="tools")
    return _list_of_calls(functions, several=parsing.parallel)


def _list_of_calls(functions: Sequence[Mapping[str, Any]], *, several: bool) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = dict(function.get("parameters") or _NOTHING)
        for name, definition in (parameters.pop("$defs", None) or {}).items():  # References are paths from the root.
            if definitions.setdefault(name, definition) != definition:
                raise RequestInvalid(f"two tools define {name!r} differently", param="tools")
        calls.append(
            {
                "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if not several:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema
