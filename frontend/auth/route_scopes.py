"""Says what a key needs for each route. A route that is not listed needs a key, of whatever scope."""

from __future__ import annotations

from headrace.broker.keys.records import Scope

OPEN = "open"  # needs no key: probes
ANY = "any"  # for every key

_PROBES = frozenset({"/live", "/ready", "/health", "/ping"})

_EXACT: dict[str, Scope] = {
    **dict.fromkeys(
        (
            *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/compact", "/v1/messages"),
            *("/v1/audio/transcriptions", "/v1/audio/translations", "/inference/v1/generate", "/api/chat", "/api/generate"),
            *("/v1/images/generations", "/v1/videos"),
        ),
        "generate",
    ),
    **dict.fromkeys(
        (
            *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/v1/classify", "/classify"),
            *("/v1/pooling", "/pooling", "/api/embed", "/api/embeddings"),
        ),
        "embed",
    ),
    **dict.fromkeys(
        (
            *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
            *("/v1/responses/input_tokens", "/v1/messages/count_tokens"),
        ),
        "tokens",
    ),
    **dict.fromkeys(("/v1/models", "/api/tags", "/api/show", "/api/ps"), "models"),
    **dict.fromkeys(("/metrics", "/load"), "metrics"),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "admin"),
    **dict.fromkeys(("/v1/conversations",), "stored"),
    "/v1/files": "files",
    "/v1/uploads": "files",
    "/v1/batches": "batches",
}
_LISTS = frozenset({"/v1/chat/completions", "/v1/videos"})  # what POST makes there, other methods list
_BELOW: tuple[tuple[str, Scope], ...] = (
    ("/v1/models/", "models"),
    ("/v1/responses/", "stored"),
    ("/v1/chat/completions/", "stored"),
    ("/v1/conversations/", "stored"),
    ("/v1/streams/", "stored"),
    ("/v1/videos/", "stored"),
    ("/v1/requests/", "generate"),
    ("/v1/files/", "files"),
    ("/v1/uploads/", "files"),
    ("/v1/batches/", "batches"),
)


def scope_of(method: str, path: str) -> str:
    """Return the scope that a request needs, OPEN or ANY."""
    if path in _PROBES:
        return OPEN
    scope = _EXACT.get(path)
    if scope is not None:
        return "stored" if path in _LISTS and method != "POST" else scope
    return next((scope for base, scope in _BELOW if path.startswith(base)), ANY)
