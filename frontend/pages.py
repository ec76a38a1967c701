"""HTML pages for `/` and `/docs`: one style sheet, no scripts, and nothing from other hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.frontend.ports import JobPort

STYLE = """
:root { color-scheme: light dark; --line: #d8dee4; --soft: #f4f6f8; --dim: #5c6670; --link: #0b62c4;
        --get: #1a7f4b; --post: #0b62c4; --delete: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --line: #333b44; --soft: #1c2127; --dim: #9aa5b1; --link: #6cb0ff;
          --get: #5ccf92; --post: #6cb0ff; --delete: #ff8a80; }
  body { background: #12161b; color: #e4e8ec; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 2rem 1.5rem 6rem; font: 16px/1.55 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.9rem; }
h2 { margin: 3rem 0 1rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); font-size: 1.3rem; }
h3 { margin: 2rem 0 .3rem; font-size: 1.05rem; }
p { margin: .4rem 0; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
code, pre { font: .92em/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--soft); padding: .9rem 1rem; border-radius: 6px; overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; table-layout: fixed; }
th:first-child { width: 32%; } th:last-child { width: 20%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--dim); font-size: .88rem; }
.dim { color: var(--dim); }
.verb { display: inline-block; min-width: 4.2rem; font: 600 .85em ui-monospace, monospace; }
.get { color: var(--get); } .post { color: var(--post); } .delete { color: var(--delete); }
nav { columns: 2; margin-top: 1.5rem; } nav p { break-inside: avoid; margin: 0 0 1rem; }
@media (max-width: 40rem) { nav { columns: 1; } }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


def html_page(title: str, body: str) -> bytes:
    """Return a page. `title` is text and is escaped, `body` is HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'.encode()


def html_response(page: bytes) -> Response:
    """Return a page as a response that may load nothing."""
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return Response(page, media_type="text/html", headers=headers)


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


DESCRIPTION = "serves language models over NATS JetStream, behind the APIs of OpenAI, Anthropic and Ollama"
LINKS = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "models": "/v1/models",
    "health": "/health",
    "metrics": "/metrics",
}


class Welcome(msgspec.Struct, kw_only=True):
    """The answer of `/`: name and version of the server, the models that can answer now, and links."""

    name: str = "Headrace"
    version: str
    description: str = f"Headrace {DESCRIPTION}."
    models: list[str]
    links: dict[str, str]
    example: str


class Pages:
    def __init__(self, port: JobPort, document: bytes) -> None:
        """`document` is the OpenAPI document as JSON."""
        self._port = port
        self._document = document
        self._reference: bytes | None = None

    def routes(self) -> list[Route]:
        return [Route("/", self.welcome), Route("/docs", self.docs)]

    async def docs(self, request: Request) -> Response:
        if self._reference is None:
            self._reference = reference_page(msgspec.json.decode(self._document))
        return html_response(self._reference)

    async def welcome(self, request: Request) -> Response:
        """Return JSON, or a page for clients whose `Accept` names HTML."""
        models = self._port.models.ready_names()
        example = _example(str(request.base_url).rstrip("/"), models[0] if models else "MODEL")
        answer = Welcome(version=metadata.version("headrace"), models=models, links=LINKS, example=example)
        if "text/html" in request.headers.get("accept", ""):
            return html_response(_page(answer))
        return Response(msgspec.json.encode(answer), media_type="application/json")


def _example(base: str, model: str) -> str:
    body = msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 64})
    return f"curl {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n  -d '{body.decode()}'"


def _page(answer: Welcome) -> bytes:
    models = "".join(f"<li><code>{escape(name)}</code></li>" for name in answer.models)
    served = f"<ul>{models}</ul>" if models else '<p>None: no worker is ready. <a href="/health">Health</a> tells more.</p>'
    links = " · ".join(f'<a href="{url}">{escape(name)}</a>' for name, url in answer.links.items())
    return html_page(
        answer.name,
        f'<h1>{answer.name}</h1><p class="dim">version {escape(answer.version)}</p><p>{escape(answer.description)}</p>'
        f"<p>{links}</p><h2>Models</h2>{served}<h2>Try it</h2><pre>{escape(answer.example)}</pre>",
    )
