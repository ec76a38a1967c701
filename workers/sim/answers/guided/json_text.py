"""JSON values of a schema as text, and schemas that come as JSON text."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from headrace.workers.sim.answers.guided.draws import Draws
from headrace.workers.sim.answers.guided.errors import Unsupported
from headrace.workers.sim.answers.guided.instance import instance
from headrace.workers.sim.answers.guided.schema_check import vet


def draw_json(given: Any, draws: Draws) -> str:
    """Draw a value of a schema and write it as JSON text. Raises Unsupported or NoInstance."""
    schema = parse_json(given)
    vet(schema)
    return json.dumps(instance(schema, draws), ensure_ascii=False)


def parse_json(given: Any) -> Any:
    """Decode a schema that came as JSON text; return any other value as it is. Raises Unsupported for bad JSON."""
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError as error:
        raise Unsupported(f"this is not JSON: {error}") from None
