"""Says which content type the body of a request must have.

A page of another site can send a form or plain text without asking the server first, and cannot send JSON. So JSON is taken
only where it is declared.
"""

from __future__ import annotations

from headrace.frontend.errors import MediaTypeRefused

_JSON = frozenset({b"application/json", b"application/json; charset=utf-8", b"application/json;charset=utf-8"})
_CURL = b"application/x-www-form-urlencoded"
_FORMS = frozenset({"/v1/files", "/v1/audio/transcriptions", "/v1/audio/translations"})
_EITHER = frozenset({"/v1/videos"})  # a form or JSON
_OLLAMA = "/api/"


def check_body_type(path: str, content_type: bytes | None, *, from_page: bool) -> None:
    """Raise MediaTypeRefused for a body that its route does not take. `from_page`: the request names the page it is from.

    Ollama's own documentation posts JSON by `curl -d`, which calls it a form. Its routes take that from clients that are no
    browsers: these name the page of every such request.
    """
    if content_type in _JSON:
        if not takes_form(path):
            return
    elif path.startswith(_OLLAMA) and not from_page and content_type in (None, _CURL):
        return
    kind = (content_type or b"").partition(b";")[0].strip().lower()
    if kind == b"multipart/form-data" and path in _EITHER:
        return
    if takes_form(path):
        if kind == b"multipart/form-data":
            return
        wanted = "multipart/form-data"
    else:
        if kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json")):
            return
        wanted = "application/json"
    given = "none" if content_type is None else repr(kind[:100].decode("latin-1"))
    raise MediaTypeRefused(f"{path} takes a body of content type {wanted}, this one has {given}", param="content-type")


def takes_form(path: str) -> bool:
    """Return True if the body of a POST is a form with a file."""
    return path in _FORMS or (path.startswith("/v1/uploads/") and path.endswith("/parts"))
