"""Values of settings: checks, conversion, masked secrets, and the further pools of one `headrace up`."""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from headrace.base.errors import SettingsError
from headrace.config.options import Option, find, find_variable, section_options

MASK = "********"

# From the start of an address to its last @ before the next address: a password may contain any other character.
_CREDENTIALS = re.compile(r"(^|://)((?:(?!://)[^\s])*)@")
_SECRET = re.compile(
    r"(^|[_.-])(password|passwd|passphrase|secret|credentials?|token|(api|access|private|secret|auth)[_-]?key)\Z"
)
_SPECIAL_TOKEN = re.compile(r"(^|[_.-])(bos|eos|pad|unk|sep|cls|mask|stop|image|audio|video)[_-]token\Z")


def mask_url(url: str) -> str:
    """Return an address, or several separated by commas, with users and passwords masked."""
    return _CREDENTIALS.sub(rf"\1{MASK}@", url) if "@" in url else url


def mask_urls(urls: Any) -> list[str]:
    """Return addresses with users and passwords masked, also a password with a comma, at which a list was split."""
    return mask_url(",".join(urls)).split(",") if urls else []


def mask_table(value: Any) -> Any:
    """Return a table of an engine's settings with the values of secret names masked, at any depth."""
    if isinstance(value, dict):
        return {key: MASK if is_secret_name(str(key)) and item is not None else mask_table(item) for key, item in value.items()}
    if isinstance(value, list):
        return [mask_table(item) for item in value]
    return mask_url(value) if isinstance(value, str) and "://" in value else value


def is_secret_name(name: str) -> bool:
    """Return True for the name of a secret: one that ends in a word such as password or api_key, but no special token."""
    lowered = name.lower()
    return bool(_SECRET.search(lowered)) and not _SPECIAL_TOKEN.search(lowered)


def secret_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that hold secret settings."""
    mine = (name for name in environ if name.startswith("HEADRACE_"))
    return [name for name in mine if (option := find_variable(name)) is not None and option.setting.secret]


def take_secrets(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove the variables of secret settings, which have been read by now, so that no child process inherits them."""
    return {name: environ.pop(name) for name in secret_variables(environ)}


def without_secrets_of_others(environ: Mapping[str, str], command: str) -> dict[str, str]:
    """Return the environment of a part, without the secrets that it does not use."""
    foreign = set()
    for name in secret_variables(environ):
        option = find_variable(name)
        if option is not None and command not in option.commands:
            foreign.add(name)
    return {name: value for name, value in environ.items() if name not in foreign}


def hide_arguments(options: list[Option]) -> None:
    """Overwrite secrets in the arguments of this process, which `ps` shows to every user. Does nothing where that fails.

    They can be seen until here; a variable or a file keeps them out of sight from the start.
    """
    flags = {option.flag for option in options if option.setting.secret and option.flag}
    texts = _secret_texts(sys.argv, flags)
    if texts and sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError, IndexError):  # without /proc
            _overwrite([text.encode() for text in texts])


def _secret_texts(arguments: list[str], flags: set[str]) -> list[str]:
    found = []
    for at, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if equals and flag in flags:
            found.append(value)
        elif at and arguments[at - 1] in flags:
            found.append(argument)
        elif "@" in argument and "://" in argument:
            found += [match[2] for match in _CREDENTIALS.finditer(argument)]
    return [text for text in found if text]


def _overwrite(texts: list[bytes]) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, counted from the field behind the name
    if not 0 < start < end:
        return
    shown = ctypes.string_at(start, end - start)
    for text in texts:
        at = shown.find(text)
        while at >= 0:
            ctypes.memset(start + at, ord("*"), len(text))
            at = shown.find(text, at + len(text))


_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_INTEGER = re.compile(r"-?\d+\Z")


def check_value(option: Option, raw: Any, source: str) -> Any:
    """Return `raw` in the setting's type. Text is converted; anything else (from TOML) must have the type already.

    Raises SettingsError naming the key, the value and its source.
    """
    try:
        value = _convert(option, raw)
    except (ValueError, TypeError) as error:
        shown = mask(option, raw) if option.setting.secret else raw
        raise SettingsError(f"{option.key} = {shown!r} ({source}): {error}") from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if option.setting.least is not None and value < option.setting.least:
            raise SettingsError(f"{option.key} = {raw!r} ({source}): the least is {option.setting.least:g}")
        if option.setting.most is not None and value > option.setting.most:
            raise SettingsError(f"{option.key} = {raw!r} ({source}): the most is {option.setting.most:g}")
    return value


def _convert(option: Option, raw: Any) -> Any:
    match option.kind:
        case "text" | "path":
            return _text(raw)
        case "choice":
            if raw not in option.choices and not (option.setting.other and isinstance(raw, str) and ":" in raw):
                other = f", or {option.setting.other}" if option.setting.other else ""
                close = close_matches(str(raw), option.choices)
                raise ValueError(f"expected one of {', '.join(option.choices)}{other}{close}")
            return raw
        case "integer":
            return _integer(raw)
        case "seconds" | "number":
            return _number(raw, "seconds" if option.kind == "seconds" else "a number")
        case "switch":
            return _switch(raw)
        case "list":
            return _list(raw)
        case "table":
            return _table(raw, names=option.setting.names)


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw:
        raise TypeError("expected a text that is not empty")
    return raw


def _integer(raw: Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and _INTEGER.match(raw.strip()):
        return int(raw)
    raise TypeError("expected a whole number")


def _number(raw: Any, what: str) -> float:
    try:
        if isinstance(raw, bool):
            raise TypeError
        value = float(raw)
    except (TypeError, ValueError):
        raise TypeError(f"expected {what} as a number, for example 2.5") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("expected a finite number")
    return value


def _switch(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE | _FALSE:
        return raw.lower() in _TRUE
    raise TypeError("expected true or false")


def _list(raw: Any) -> tuple[str, ...]:
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise TypeError("expected a list of texts, or texts separated by commas")
    return tuple(item.strip() for item in items if item.strip())


def _table(raw: Any, *, names: bool) -> dict[str, Any]:
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raise ValueError('expected a JSON object, for example {"max_model_len": 2048}') from None
    if isinstance(raw, list):  # repeated KEY=VALUE flags
        return dict(parse_assignment(item, names=names) for item in raw)
    if not isinstance(raw, dict):
        raise TypeError("expected a table")
    return raw


def mask(option: Option, value: Any) -> Any:
    if value is None:
        return None
    if option.setting.secret:
        return MASK if value else value
    if option.kind == "table":
        return mask_table(value)
    if option.kind == "list":
        return mask_urls(value)
    return mask_url(value) if isinstance(value, str) and "://" in value else value


def as_text(option: Option, value: Any) -> str:
    """Return the value as an environment variable would give it."""
    if option.kind == "list":
        return ",".join(value)
    if option.kind == "table":
        return json.dumps(value)
    if option.kind == "switch":
        return "true" if value else "false"
    return str(value)


def close_matches(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` with similar names, or an empty text."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def parse_assignment(text: str, *, names: bool = False) -> tuple[str, Any]:
    """Split `key=value` into key and value, the value read as JSON when it is JSON. Raises ValueError.

    A hyphen in a key becomes `_`, unless keys are `names` from outside.
    """
    key, equals, raw = text.partition("=")
    key = key.strip() if names else key.strip().replace("-", "_")
    if not equals or not key:
        raise ValueError("expected KEY=VALUE")
    try:
        return key, json.loads(raw)
    except ValueError:
        return key, raw


# Derives the settings of the further pools of one `headrace up` (`up.pools`), each with a model and an engine of its own.
#
#     [up.pools.small-sglang]       # the name that clients use
#     engine = "sglang"
#     workers = 2
#     engine_args = {dtype = "float32"}
#
#     [up.pools.dear]               # a further fleet of another pool: with the name that clients use for that one
#     served_name = "small"
#     fleet = "dear"
#     price = 4
#
# A pool has the settings of `worker`, and `mode` and the numbers of workers of `up`. What it does not give is as for the
# first pool, which is the one that `worker` and `up` describe; names, engine settings and numbers of workers are each pool's
# own.

POOLS = "up.pools"
POOL = "worker.pool"

OF_UP = frozenset({"mode", "workers", "prefill_workers", "decode_workers", "encode_workers"})
"""Settings of `up` that a pool may give."""
NOT_SHARED = frozenset(
    {*(f"up.{name}" for name in OF_UP), "worker.served_name", "worker.aliases", "worker.engine_args", "worker.tool_parser"}
    | {"worker.reasoning_parser", "worker.fleet", "worker.price", "worker.pool_block"}
)
"""Settings that a pool does not have from the first one: engines have parsers and settings under names of their own."""
_FIXED = frozenset({"name", "role", "pool", "metrics_port"})  # of a pool by its name, of a worker by `up`


def values_of_pool(pools: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """Return key → value as given, of the settings of one pool, its name among them.

    Raises SettingsError for a pool that is not there, that is no table, or that has something else than settings of a pool.
    """
    if name not in pools:
        raise SettingsError(f"{POOL} = {name!r}: {POOLS} has no such pool{close_matches(name, pools)}")
    given = pools[name]
    if not name or not isinstance(given, dict):
        raise SettingsError(
            f'{POOLS} ({source}): a pool is a name and a table of settings, as small={{"engine": "sim"}}, not {name}={given!r}'
        )
    values = {"worker.served_name": name}
    for field, value in given.items():
        key = f"up.{field}" if field in OF_UP else f"worker.{field}"
        if field in _FIXED or find(key) is None:
            known = {option.key.removeprefix("worker.") for option in section_options("worker")} - _FIXED | OF_UP
            raise SettingsError(f"{POOLS}.{name} ({source}): {field!r} is no setting of a pool{close_matches(field, known)}")
        values[key] = value
    if "served_name" in given and not given.get("fleet"):
        raise SettingsError(f"{POOLS}.{name} ({source}): a pool with a served_name is a fleet of that model: give it a fleet")
    return values
