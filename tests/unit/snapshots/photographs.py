"""Renders all that others can see of Headrace as sorted text, one thing per line, so that a change of it shows as a short diff.

Three more of the kind are files of the tree already, each with a test of its own: the calls per request
(`tests/simulation/cost/calls_per_request.json`), the seeds of the guards (the tables of `tests/simulation/*/test_guards.py`)
and messages as an earlier version wrote them (`tests/unit/broker/wire_of_an_earlier_version.json`).
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import msgspec

from headrace.base import errors as command_errors
from headrace.base.errors import HeadraceError
from headrace.broker.codec import encode
from headrace.cli import build_parser, command_names
from headrace.commands.groups import ShowUsualHelp
from headrace.commands.info import show_config
from headrace.commands.run import exit_code
from headrace.config.options import Command, all_options
from headrace.config.settings import load
from headrace.frontend import errors as http
from headrace.frontend.openapi import build_openapi
from headrace.jetstream import topology
from headrace.jetstream.specs import consumer_config
from headrace.jetstream.subjects import REQUEST_CLASSES, Subjects
from headrace.jetstream.topology import Topology
from tests.docs.metrics_table import MODULES, declared
from tests.support.wire_samples import kinds, sample

ROOT = Path(__file__).parents[3]
FILES = Path(__file__).parent / "files"
PRODUCT = ("jetstream", "broker", "router", "workers", "frontend", "headrace", "tools")
LEVELS = {"debug", "info", "warning", "error", "exception"}
WIDTH = 120


def openapi() -> list[str]:
    return list(_json(json.loads(build_openapi())))


def _json(value: Any, indent: int = 0, before: str = "", after: str = "") -> Iterator[str]:
    """JSON with each object and list that fits into a line on one."""
    whole = f"{' ' * indent}{before}{json.dumps(value, sort_keys=True, ensure_ascii=False)}{after}"
    if len(whole) <= WIDTH or not isinstance(value, dict | list):
        yield whole
        return
    items = (
        [(f"{json.dumps(key)}: ", value[key]) for key in sorted(value)]
        if isinstance(value, dict)
        else [("", one) for one in value]
    )
    begin, end = "{}" if isinstance(value, dict) else "[]"
    yield f"{' ' * indent}{before}{begin}"
    for index, (name, item) in enumerate(items):
        yield from _json(item, indent + 1, name, "," if index < len(items) - 1 else "")
    yield f"{' ' * indent}{end}{after}"


def settings() -> list[str]:
    """`key = default (type) | commands`, as `headrace config --json` shows them where nothing is given."""
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for command in get_args(Command):
        shown = json.loads(show_config(load(command, environ={}, folder=FILES), as_json=True))
        for key, value in shown.items():
            values[key][json.dumps(value["value"], sort_keys=True)].append(command)
    types = {one.key: "|".join(one.choices) or one.kind for one in all_options()}
    return sorted(
        f"{key} = {value} ({types[key]}) | {' '.join(sorted(commands))}"
        for key, found in values.items()
        for value, commands in found.items()
    )


def metrics() -> list[str]:
    """`name type {labels} buckets | the folder of what counts it`."""
    return sorted(
        f"{one.name} {one.kind} {{{', '.join(one.labels)}}} {' '.join(f'{bound:g}' for bound in one.buckets)}".rstrip()
        + f" | {module.removeprefix('headrace.').partition('.')[0]}"
        for module in MODULES
        for one in declared(module)
    )


def log_events() -> list[str]:
    """`event: levels (fields)`."""
    levels, fields = defaultdict(set), defaultdict(set)
    for tree in _modules().values():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(attr=level), args=[first, *_]) if level in LEVELS:
                    event = _text(first)
                    if re.fullmatch(r"[a-z_{}]+(\.[a-z_{}]+)+", event):
                        levels[event].add(level)
                        fields[event] |= {keyword.arg or "**" for keyword in node.keywords}
    return sorted(f"{event}: {' '.join(sorted(found))} ({', '.join(sorted(fields[event]))})" for event, found in levels.items())


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) or "{}" for part in parts)
        case _:
            return ""


@functools.cache
def _modules() -> dict[str, ast.Module]:
    files = (file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py"))
    parts = (
        (file, [one for one in file.relative_to(ROOT).with_suffix("").parts if one not in ("headrace", "__init__")])
        for file in files
    )
    return {".".join(["headrace", *names]): ast.parse(file.read_bytes()) for file, names in parts}


def streams() -> list[str]:
    """Streams, buckets, object stores and consumers as the server is asked for them, and every subject."""
    names, pool = Subjects("snap"), "pool-1"
    whole = Topology(names)
    made = {spec.name: spec.config() for spec in (*whole.all_streams(), *(one.stream() for one in whole.pool_stores(pool)))}
    consumers = [
        *(topology.request_consumer(names, pool, one) for one in REQUEST_CLASSES),
        topology.job_consumer(names, "model"),
        topology.work_consumer(names, pool, "worker-1"),
        topology.prefill_consumer(names, pool),
        topology.prefill_consumer(names, pool, "worker-1"),
    ]
    made |= {f"{spec.stream} {spec.name}": consumer_config(spec) for spec in consumers}
    lines = [f"{name}: {key} = {json.dumps(value)}" for name, config in made.items() for key, value in config.items()]
    subjects = {name: getattr(names, name) for name in dir(names) if not name.startswith("_")}
    lines += [f"subject {name} = {said}" for name, make in subjects.items() if callable(make) if (said := _said(name, make))]
    lines += [f"default {key} = {value}" for key, value in asdict(whole).items() if key != "subjects"]
    return sorted(lines)


_ARGUMENTS: dict[str, Any] = {"request_class": "std", "place": "worker-1~2", "window": 1, "to_ingress": "snap.out.ingress-1"}


def _said(name: str, make: Callable[..., Any]) -> str:
    if name.startswith(("parse_", "tenant_of", "spoken_by", "work_consumer_owner")):
        return ""
    code = make.__func__.__code__  # type: ignore[attr-defined]
    wanted = code.co_varnames[1 : code.co_argcount]
    return str(make(*(_ARGUMENTS.get(one, f"{one}-1") for one in wanted)))


def wire() -> list[str]:
    """`Message.field = value` of a sample of each message on the wire; `Message.[place]` where fields have no names."""
    lines = []
    for name, kind in kinds().items():
        raw = msgspec.msgpack.decode(encode(sample(kind)))
        fields = raw.items() if isinstance(raw, dict) else ((f"[{place}]", value) for place, value in enumerate(raw))
        lines += [f"{name}.{key} = {value!r}" for key, value in fields]
    return sorted(lines)


def exit_codes() -> list[str]:
    """The codes by name, and the code of a command that an error ends, where it is not the code of any failure."""
    names = {name: value for name, value in vars(command_errors).items() if name.startswith("EXIT_")}
    codes = {
        kind.__name__: code for kind in _errors() if (code := exit_code(kind.__new__(kind))) != command_errors.EXIT_FAILURE
    }
    return [f"{name} = {code}" for name, code in sorted(names.items()) + sorted(codes.items())]


@functools.cache
def _errors() -> set[type[HeadraceError]]:
    """All errors of the product, whatever has been imported before."""
    classes = [
        (module, node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases})
        for module, tree in _modules().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    errors = {"HeadraceError"}
    while more := {name for _, name, bases in classes if bases & errors} - errors:
        errors |= more
    for module in {module for module, name, _ in classes if name in errors}:
        importlib.import_module(module)
    return _below(HeadraceError)


def _below(kind: type[HeadraceError]) -> set[type[HeadraceError]]:
    return {kind}.union(*(_below(one) for one in kind.__subclasses__() if one.__module__.startswith("headrace.")))


def http_errors() -> list[str]:
    """`Error: status type code retriable`, and the same of each error inside that HTTP clients get to see."""
    own = [one for one in _errors() if issubclass(one, http.FrontendError)]
    lines = [f"{one.__name__}: {_answer(http.FrontendError.__new__(one))}" for one in own if one is not http.Translated]
    for kind in http._RULES:
        for reason in (*http.UNAVAILABLE, "queue_full") if "reason" in kind.__init__.__annotations__ else ("",):
            error: Any = kind.__new__(kind)
            for name, value in {"reason": reason, "code": "<code>", "param": "<param>", "retry_after_s": 1.5}.items():
                if not hasattr(error, name):
                    setattr(error, name, value)
            lines.append(f"{kind.__name__}{f'({reason})' if reason else ''} -> {_answer(http.translate(error))}")
    return sorted(lines)


def _answer(error: http.FrontendError) -> str:
    known = vars(error)
    more = "".join(f" {name}={known[name]}" for name in ("param", "retry_after_s") if known.get(name) is not None)
    return f"{error.status} {error.type} {error.code}{' retriable' if error.retriable else ''}{more}"


def commands() -> list[str]:
    """Every command with its whole `--help`: what it is for, its arguments with what is said of them, and its examples."""
    lines = _described(build_parser())
    for command in sorted(command_names()):
        below: Any = build_parser(command)
        lines += ["", *_described(below.below()[command])]
    return lines


def _described(parser: argparse.ArgumentParser) -> list[str]:
    formatter = parser._get_formatter()
    lines = [f"## {parser.prog}", *(parser.description or "").splitlines()]
    rare = {id(one) for action in parser._actions if isinstance(action, ShowUsualHelp) for one in action.rare}
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        many = {None: "", 0: ""}.get(action.nargs, f" nargs={action.nargs}")  # type: ignore[arg-type]
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = f" {action.metavar}" if action.option_strings and action.metavar else ""
        choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices and action.nargs != argparse.PARSER else ""
        needed = " required" if action.required and action.option_strings else ""
        said = formatter._expand_help(action) if action.help else ""
        lines.append(f"{name}{value}{choices}{many}{needed}{' [--help-all]' if id(action) in rare else ''} : {said}")
        if action.nargs == argparse.PARSER:
            lines += [f"  {one.dest} : {one.help}" for one in action._get_subactions()]
    lines += (parser.epilog or "").splitlines()
    below = parser.below() if hasattr(parser, "below") else {}
    for name in sorted(below):
        if parser.prog != "headrace":
            lines += ["", *_described(below[name])]
    return lines


SNAPSHOTS: dict[str, Callable[[], list[str]]] = {
    "openapi.json": openapi,
    "settings.txt": settings,
    "metrics.txt": metrics,
    "log_events.txt": log_events,
    "streams.txt": streams,
    "wire.txt": wire,
    "exit_codes.txt": exit_codes,
    "http_errors.txt": http_errors,
    "commands.txt": commands,
}


def taken(name: str) -> str:
    """The snapshot of this name, of the tree as it is."""
    return "\n".join(line.rstrip() for line in SNAPSHOTS[name]()) + "\n"
