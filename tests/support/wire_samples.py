"""Makes one message of every type on the wire with each field set, and keeps those of an earlier version in a file.

python -m tests.support.wire_samples COMMIT      in the tree of that commit: a release, or what stands for one
"""

from __future__ import annotations

import base64
import importlib
import json
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from headrace.broker import messages
from headrace.broker.codec import encode

FILE = Path(__file__).parents[1] / "unit" / "broker" / "wire_of_an_earlier_version.json"
TEXTS = ("x1", "x.1", "1", "a" * 32, "a" * 64, "a" * 16)


def every_message() -> dict[str, type[msgspec.Struct]]:
    """Return the types of all messages by name."""
    names = [found.name for found in pkgutil.iter_modules(messages.__path__, f"{messages.__name__}.")]
    return {
        name: kind
        for module in map(importlib.import_module, names)
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
        and name != "Record"
    }


def kinds() -> dict[str, type[msgspec.Struct]]:
    """Return the types of messages that have samples: not those that only prefill and encode workers exchange."""
    return {
        name: kind
        for name, kind in every_message().items()
        if kind.__module__ != "headrace.broker.messages.prefill"
        and name not in ("SetRole", "EncodeMedia", "LentRecord", "MediaEncoded")
    }


def sample(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Return a message with every field set, or at least with those that must be, where its fields exclude each other."""
    info: Any = inspect.type_info(kind)
    fields = {field.name: field for field in info.fields if field.name != "v"}
    whole = {name: _value(field.type) for name, field in fields.items()}
    least = {name: whole[name] for name, field in fields.items() if field.required}
    for values in (whole, least):
        try:
            made = kind(**values)
            return msgspec.msgpack.decode(encode(made), type=kind)
        except (ValueError, TypeError):
            continue
    raise AssertionError(f"{kind.__name__} takes no sample")


def _value(of: Any) -> Any:  # noqa: C901 # one line for each type there is
    match of:
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return int(max(of.ge or 0, 2)) if of.le is None or of.le >= 2 else int(of.le)
        case inspect.FloatType():
            return 1.5 if of.le is None or of.le >= 1.5 else float(of.le)
        case inspect.StrType():
            return next(text for text in TEXTS if re.search(of.pattern or "", text))
        case inspect.BytesType():
            return bytes(max(of.min_length or 0, 8))
        case inspect.LiteralType():
            return of.values[-1]
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return _plain(of, [_value(of.item_type)])
        case inspect.TupleType():
            return tuple(_value(item) for item in of.item_types)
        case inspect.DictType():
            return {_value(of.key_type): _value(of.value_type)}
        case inspect.UnionType():
            return _value(next(one for one in of.types if not isinstance(one, inspect.NoneType)))
        case inspect.StructType():
            return sample(of.cls)
        case inspect.EnumType():
            return next(iter(of.cls))
        case inspect.Metadata():
            return _value(of.type)
        case inspect.RawType():
            return msgspec.Raw(encode({"a": 1}))
        case _:
            return None if isinstance(of, inspect.NoneType) else {"a": 1}


def _plain(of: Any, items: list[Any]) -> Any:
    made = {inspect.VarTupleType: tuple, inspect.SetType: set, inspect.FrozenSetType: frozenset}.get(type(of), list)
    return made(items)


def main(commit: str) -> None:
    """Write the messages of this tree."""
    found = {name: base64.b64encode(encode(sample(kind))).decode() for name, kind in kinds().items()}
    FILE.write_text(json.dumps({"commit": commit, "messages": found}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
