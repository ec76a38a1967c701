"""Lays out the HTML pages: one frame and one style sheet, without scripts and without anything from other hosts."""

from __future__ import annotations

from html import escape

from starlette.responses import Response

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
