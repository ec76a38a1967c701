"""Answers routes of the served APIs that this server leaves out with an error that lists the served ones."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.frontend.errors import RouteNotFound

NOT_SERVED = {
    "/api/blobs": "the files of models",
    "/api/copy": "copying models",
    "/api/create": "making models",
    "/api/delete": "deleting models",
    "/api/pull": "pulling models",
    "/api/push": "pushing models",
    "/v1/assistants": "assistants",
    "/v1/audio": "speech and voices",
    "/v1/chatkit": "chat kits",
    "/v1/complete": "Anthropic's text completions",
    "/v1/containers": "containers",
    "/v1/edits": "edits",
    "/v1/engines": "engines",
    "/v1/evals": "evaluations",
    "/v1/fine-tunes": "fine-tuning jobs",
    "/v1/fine_tuning": "fine-tuning jobs",
    "/v1/images": "edits and variations of images",
    "/v1/messages/batches": "batches",
    "/v1/moderations": "moderations",
    "/v1/organization": "organizations",
    "/v1/projects": "projects",
    "/v1/realtime": "realtime sessions",
    "/v1/threads": "threads of assistants",
    "/v1/vector_stores": "vector stores",
    "/v1/videos": "remixes of videos",
}


class NotServed(RouteNotFound, code="not_served"):
    """The API has such a route, but this server does not serve it."""


def missed(path: str, served: Iterable[str]) -> RouteNotFound:
    """Return the 404 of a path, for any method. `served` has the paths of this server."""
    there = ", ".join(sorted(served))
    for prefix, what in NOT_SERVED.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return NotServed(f"{path}: {what} are not served here; served here: {there}")
    return RouteNotFound(f"no route {path}; served here: {there}")
