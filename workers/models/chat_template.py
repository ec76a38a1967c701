"""Reads an operator's chat template and tries it, so that a wrong one stops the start and not the first chat."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headrace.workers.errors import EngineStartFailed

MOST_BYTES = 1 << 20
SAID = "a-message-to-try-the-template"
_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # mark text for training alone


def read_template(path: str) -> bytes:
    """Return the template in a file. Raises EngineStartFailed if it cannot be read, does not compile, or loses a message.

    It renders a short chat, so call it in a thread.
    """
    try:
        data = Path(path).expanduser().read_bytes()
        source = data.decode()
    except OSError as error:
        raise EngineStartFailed(f"the chat template {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise EngineStartFailed(f"the chat template {path} is not UTF-8: {error}") from None
    if len(data) > MOST_BYTES:
        raise EngineStartFailed(f"the chat template {path} has {len(data)} bytes; {MOST_BYTES} are the most")
    _try(source, path)
    return data


def _try(source: str, path: str) -> None:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda _pattern: "today"}
    try:
        template = environment.from_string(_MARKS.sub("", source))
    except jinja2.TemplateSyntaxError as error:
        raise EngineStartFailed(f"the chat template {path} does not compile: {error.message} (line {error.lineno})") from None
    # Templates take a message as text, or as parts; one of the two is enough.
    contents: tuple[Any, ...] = (SAID, [{"type": "text", "text": SAID}])
    why = "it leaves the message out"
    for content in contents:
        chat = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": True}
        try:
            if SAID in template.render(**chat, bos_token="", eos_token="", tools=None):
                return
        except Exception as error:  # of the template's own code: anything may be raised
            why = f"{type(error).__name__}: {error}"
    raise EngineStartFailed(f"the chat template {path} cannot render a chat of one message: {why}")


def _raise_exception(message: str) -> None:
    raise ValueError(message)
