"""Keeps secrets out of what others can see: settings that are shown, the list of processes, the environment of children."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from headrace.config.options import Option, find_variable

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
    """Return the parts of arguments that are secrets."""
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
