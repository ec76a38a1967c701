"""Writes the page `/docs` from the OpenAPI document: every route with its parameters, and every type with its fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from headrace.frontend.pages.style import html_page

GROUPS: dict[str, Sequence[str]] = {
    "OpenAI": ("/v1/chat", "/v1/completions", "/v1/responses", "/v1/conversations", "/v1/embeddings", "/v1/models"),
    "Anthropic": ("/v1/messages",),
    "Ollama": ("/api",),
    "Tokens": ("/inference", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"),
    "Scores, classes and vectors": ("/v1", "/v2", "/score", "/rerank", "/classify", "/pooling"),
}
"""Name of a group → prefixes of its paths. The first group that has a prefix of a path gets it."""

CONTROL = "Requests that run"
SERVER = "The server"

Schema = Mapping[str, Any]


def reference_page(document: Mapping[str, Any]) -> bytes:
    """Return the page of an OpenAPI document."""
    info = document["info"]
    groups: dict[str, list[str]] = {name: [] for name in (*GROUPS, CONTROL, SERVER)}
    contents: dict[str, list[str]] = {name: [] for name in groups}
    for path, item in document["paths"].items():
        group = group_of(path)
        for method, operation in item.items():
            if method != "parameters":
                groups[group].append(_operation(path, method, operation, item.get("parameters", ())))
                contents[group].append(f'<a href="#{_anchor(path, method)}">{_verb(method)} {escape(path)}</a>')
    parts = [f"<h1>{escape(info['title'])}</h1>"]
    parts.append(f'<p class="dim">{escape(info["description"])} · version {escape(info["version"])}</p>')
    links = '<a href="/openapi.json">openapi.json</a> · <a href="/v1/models">models</a> · <a href="/health">health</a>'
    parts.append(f'<p>{links} · <a href="#types">types</a></p><nav>')
    parts += (f"<p><b>{escape(name)}</b><br>{'<br>'.join(lines)}</p>" for name, lines in contents.items() if lines)
    parts.append("</nav>")
    for name, operations in groups.items():
        if operations:
            parts += (f"<h2>{escape(name)}</h2>", *operations)
    parts.append('<h2 id="types">Types</h2>')
    parts += (_type(name, schema) for name, schema in sorted(document["components"]["schemas"].items()))
    return html_page(f"{info['title']} API", "".join(parts))


def group_of(path: str) -> str:
    """Return the group of a path."""
    if path.startswith("/v1/requests/"):
        return CONTROL
    for name, prefixes in GROUPS.items():
        if any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes):
            return name
    return SERVER


def _prose(text: str) -> str:
    """Return text with what stands between backticks as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))


def _anchor(path: str, method: str) -> str:
    return escape(method + path.replace("/", "-").replace("{", "").replace("}", ""), quote=True)


def _verb(method: str) -> str:
    return f'<span class="verb {escape(method)}">{escape(method.upper())}</span>'


def _operation(path: str, method: str, operation: Mapping[str, Any], shared: Sequence[Mapping[str, Any]]) -> str:
    parts = [f'<h3 id="{_anchor(path, method)}">{_verb(method)} <code>{escape(path)}</code></h3>']
    parts.append(f"<p>{_prose(operation.get('summary', ''))}</p>")
    if body := operation.get("requestBody"):
        parts.append(f"<p><b>Body</b>: {', '.join(_contents(body))}</p>")
    if parameters := [*shared, *operation.get("parameters", ())]:
        rows = "".join(_row(p["name"], p["schema"], p["in"], required=p.get("required", False)) for p in parameters)
        parts.append(f"<table><tr><th>parameter</th><th>type</th><th></th></tr>{rows}</table>")
    good, bad = [], []
    for status, answer in operation["responses"].items():
        if status < "300":
            shapes = ", ".join(_contents(answer))
            good.append(f"<p><b>{status}</b>: {_prose(answer['description'])}{f' ({shapes})' if shapes else ''}</p>")
        else:
            bad.append(f'<span title="{escape(answer["description"], quote=True)}">{status}</span>')
    parts += good
    if bad:
        parts.append(f'<p class="dim">errors: {", ".join(bad)}</p>')
    return "".join(parts)


def _contents(body: Mapping[str, Any]) -> Iterator[str]:
    for kind, content in body.get("content", {}).items():
        if schema := content.get("schema"):
            yield _shape(schema) if kind == "application/json" else escape(kind)


def _type(name: str, schema: Schema) -> str:
    parts = [f'<h3 id="{escape(name, quote=True)}"><code>{escape(name)}</code></h3>']
    if text := schema.get("description"):
        parts.append(f"<p>{_prose(text)}</p>")
    if fields := schema.get("properties"):
        required = schema.get("required", ())
        rows = "".join(_row(field, inner, "", required=field in required) for field, inner in fields.items())
        parts.append(f"<table><tr><th>field</th><th>type</th><th></th></tr>{rows}</table>")
    else:
        parts.append(f"<p>{_shape(schema)}</p>")
    return "".join(parts)


def _row(name: str, schema: Schema, where: str, *, required: bool) -> str:
    notes = [where] if where else []
    if required:
        notes.append("required")
    elif schema.get("default") is not None and "const" not in schema and len(schema.get("enum", ())) != 1:
        notes.append(f"default {schema['default']}")
    cells = f"<td><code>{escape(name)}</code></td><td>{_shape(schema)}</td>"
    return f'<tr>{cells}<td class="dim">{escape(", ".join(notes))}</td></tr>'


def _shape(schema: Schema) -> str:
    """Return a type in words. That a value may be null is left out: it always means "not given"."""
    if reference := schema.get("$ref"):
        name = reference.rsplit("/", 1)[1]
        return f'<a href="#{escape(name, quote=True)}">{escape(name)}</a>'
    for many in ("anyOf", "oneOf"):
        if options := schema.get(many):
            return " or ".join(_shape(option) for option in options if option.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"] if value is not None)
    if "const" in schema:
        return f"<code>{escape(str(schema['const']))}</code>"
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_shape(schema.get('items') or {})}{_range(schema, 'Items', 'items')}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"map to {_shape(values)}" if isinstance(values, Mapping) and values else "object"
    if kind is None:
        return "any value"
    return escape(str(kind)) + _range(schema, "Length", "characters") + _bounds(schema)


def _range(schema: Schema, what: str, unit: str) -> str:
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    if least is None and most is None:
        return ""
    words = f"{least or 0} to {most}" if most is not None else f"at least {least}"
    return f' <span class="dim">({words} {unit})</span>'


def _bounds(schema: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": "&gt;", "maximum": "≤", "exclusiveMaximum": "&lt;"}
    found = [f"{sign} {schema[key]}" for key, sign in signs.items() if key in schema]
    return f' <span class="dim">({", ".join(found)})</span>' if found else ""
