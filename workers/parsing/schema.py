"""The JSON that an answer must be when a tool has to be called and no parser knows the model's own way to say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.broker.messages import Parsing
from headrace.workers.errors import RequestInvalid
from headrace.workers.parsing.interface import named_function

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def forced_schema(parsing: Parsing) -> dict[str, Any] | None:
    """The arguments of the named function, or for `required` a list of calls; None when no call is forced.

    Raises RequestInvalid for a name that no tool has.
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
        for name, definition in (parameters.pop("$defs", None) or {}).items():  # references to them count from the top
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
