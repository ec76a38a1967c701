"""What tests of structured output share: a text for a guide and a key, checked against its schema."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from headrace.workers.sim.guided import guided_text
from headrace.workers.sim.guided_strings import Draws

WORDS = ["cat", "dog", "the", "understanding", "of"]
KEYS = [str(n).encode() for n in range(30)]


def text(guided: dict[str, Any], key: bytes = b"k") -> str:
    return guided_text(guided, Draws(key, WORDS))


def valid(schema: Any, key: bytes) -> Any:
    value = json.loads(text({"json": schema}, key))
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(value)
    return value
