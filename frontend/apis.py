"""The registry of HTTP APIs, and the site on which they put their routes.

An API is an `HttpApi` that an entry point of the group `headrace.apis` names. Those of Headrace are listed below, in the order
of the OpenAPI document; without its line an API is neither served nor described.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, TypeVar, cast

from starlette.routing import Route
from starlette.types import ASGIApp

from headrace.base.errors import SettingsError
from headrace.broker.batches.service import Batches
from headrace.broker.files.uploads import UploadStore
from headrace.broker.models.card_store import AdapterClient
from headrace.broker.spill import ResultObjects
from headrace.frontend.errors import ErrorForm, FrontendError
from headrace.frontend.generation.endpoint import Api, GenerationEndpoint, Lifecycle
from headrace.frontend.http.exchange import Handler, unary_endpoint
from headrace.frontend.metrics import Metrics
from headrace.frontend.ports import JobPort, RecordPort, ResponsePort, StoredJobPort
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.request_audit import Notes, audited
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.tracer import Tracer, traced

T = TypeVar("T")

API_GROUP = "headrace.apis"

_BUILT_IN = {
    "openai": "headrace.frontend.openai.api:API",
    "models": "headrace.frontend.status:MODELS",
    "responses": "headrace.frontend.responses.routes:API",
    "anthropic": "headrace.frontend.anthropic.api:API",
    "pooling": "headrace.frontend.pooling.api:API",
    "images": "headrace.frontend.images:API",
    "videos": "headrace.frontend.videos:API",
    "transcriptions": "headrace.frontend.transcriptions:API",
    "tokens": "headrace.frontend.openai.tokens_api:API",
    "ollama": "headrace.frontend.ollama.api:API",
    "server": "headrace.frontend.status:SERVER",
    "files": "headrace.frontend.files:API",
    "batches": "headrace.frontend.batches:API",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HttpApi:
    """An API: `mount` puts its routes on a site; `types` and `paths` are its part of the OpenAPI document.

    `speaks` returns True for a path and headers of this API. Errors of such requests have the form `error_form` even if they
    do not reach a route.
    """

    mount: Callable[[Site], None]
    types: Sequence[Any] = ()
    paths: Callable[[], dict[str, Any]] = dict
    error_form: ErrorForm = FrontendError.body
    speaks: Callable[[str, Iterable[tuple[bytes, bytes]]], bool] | None = None


@cache
def load_apis() -> tuple[HttpApi, ...]:
    """Return all APIs, those of other packages last. A built-in name cannot be taken. Raises SettingsError."""
    named = dict(_BUILT_IN)
    for point in sorted(entry_points(group=API_GROUP), key=lambda point: point.name):
        named.setdefault(point.name, point.value)
    return tuple(_load(name, value) for name, value in named.items())


def _load(name: str, value: str) -> HttpApi:
    try:
        found = resolve_name(value)
    except Exception as error:
        raise SettingsError(f"HTTP API {name!r} ({value}) cannot be loaded: {error}") from error
    if not isinstance(found, HttpApi):
        raise SettingsError(f"HTTP API {name!r} ({value}) is a {type(found).__name__} and not an HttpApi")
    return found


def form_of(path: str, headers: Iterable[tuple[bytes, bytes]]) -> ErrorForm:
    """Return the form of errors of a request that does not reach its route."""
    for api in load_apis():
        if api.speaks is not None and api.speaks(path, headers):
            return api.error_form
    return FrontendError.body


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The stores of a frontend. Without one of them the routes that need it store nothing.

    Without `responses` no response can be continued by its id, and without `records` too no chat or conversation is stored.
    Without `jobs` no answer can be durable or made in the background, and without it or `records` no video be made, without
    `uploads` and `batches` there are no routes over files and batches, without `results` a picture or video has to fit into a
    frame. Without `notes` no audit records are made.
    """

    responses: ResponsePort | None = None
    records: RecordPort | None = None
    jobs: StoredJobPort | None = None
    uploads: UploadStore | None = None
    batches: Batches | None = None
    results: ResultObjects | None = None
    notes: Notes | None = None


class Site:
    """The things that an API is built from, and the place of its routes. A path that is taken raises SettingsError."""

    def __init__(
        self,
        port: JobPort,
        settings: FrontendSettings,
        metrics: Metrics,
        *,
        lifecycle: Lifecycle | None = None,
        stores: Stores | None = None,
        adapters: AdapterClient | None = None,
        tracer: Tracer | None = None,
        document: bytes = b"",
    ) -> None:
        """Without `adapters` no adapter can be loaded over HTTP, whatever the settings say. `document`: OpenAPI's, as JSON."""
        self.port = port
        self.models = port.models
        self.settings = settings
        self.metrics = metrics
        self.model_cache = ModelCache(port.models, settings, metrics)
        self.lifecycle = lifecycle or Lifecycle()
        self.stores = stores or Stores()
        self.adapters = adapters
        self.tracer = tracer
        self.document = document
        self.hot: dict[str, ASGIApp] = {}
        self.routes: list[Route] = []
        self.jobs: dict[str, Api] = {}
        self.on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self._shared: dict[type[Any], object] = {}

    def generate(self, path: str, api: Api, *, job: Api | None = None, takes_form: bool = False) -> None:
        """Serve `POST path` by work for a worker. With `job` stored jobs and lines of batches may name the path, too.

        `takes_form`: the body is a form, not JSON.
        """
        endpoint: ASGIApp = GenerationEndpoint(
            api, self.port, self.settings, self.metrics, self.lifecycle, takes_form=takes_form
        )
        if self.stores.notes is not None:
            endpoint = audited(endpoint, self.stores.notes, path)
        if self.tracer is not None:
            endpoint = traced(endpoint, self.tracer, path)
        self._take(path, endpoint)
        if job is not None:
            self.jobs[path] = job

    def answer(self, path: str, handler: Handler, *, form: ErrorForm = FrontendError.body) -> None:
        """Serve `POST path` here, body in, body out."""
        self._take(path, unary_endpoint(handler, self.settings, form=form))

    def shared(self, kind: type[T], make: Callable[[], T]) -> T:
        """Return the one object of this kind, which several APIs use."""
        if kind not in self._shared:
            self._shared[kind] = make()
        return cast("T", self._shared[kind])

    def _take(self, path: str, endpoint: ASGIApp) -> None:
        if path in self.hot:
            raise SettingsError(f"two HTTP APIs serve POST {path}")
        self.hot[path] = endpoint
