"""Builds the ASGI application: its routes, and one shape for every error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.errors import HeadraceError
from headrace.broker.batches.service import Batches
from headrace.broker.files.uploads import UploadStore
from headrace.frontend.admin import AdapterLoader, CancelRoute, adapter_routes
from headrace.frontend.admin import missed as missing_route
from headrace.frontend.anthropic.api import MessagesApi
from headrace.frontend.auth.gate import Gate
from headrace.frontend.auth.key_ring import KeyRing
from headrace.frontend.batches import BatchRoutes
from headrace.frontend.durable_api import DurableApi, DurableStreams, StreamRoutes
from headrace.frontend.errors import Draining, ErrorForm, FrontendError, MethodNotAllowed, translate
from headrace.frontend.files import FileRoutes, UploadRoutes
from headrace.frontend.generation.endpoint import Api, GenerationEndpoint
from headrace.frontend.http.exchange import HttpExchange, UnaryEndpoint
from headrace.frontend.http.middleware import Observe
from headrace.frontend.images import PATH as IMAGES
from headrace.frontend.images import ImageApi, Results
from headrace.frontend.job_renderer import ApiRenderer, Charge
from headrace.frontend.metrics import Metrics
from headrace.frontend.ollama.api import OllamaChatApi, OllamaEmbedApi, OllamaModelRoutes, OllamaPromptApi, OllamaVectorApi
from headrace.frontend.ollama.schema import OllamaForm
from headrace.frontend.openai.chat import ChatApi, CompletionApi
from headrace.frontend.openai.stored_chats import StoredChatRoutes, StoredChats
from headrace.frontend.openai.token_generation import PATH as GENERATE
from headrace.frontend.openai.token_generation import TokenGenerationApi
from headrace.frontend.openai.tokens_api import TokensApi
from headrace.frontend.openapi import build_openapi
from headrace.frontend.pages import Pages
from headrace.frontend.pooling.api import EmbeddingApi, pooling_routes
from headrace.frontend.ports import JobPort, RecordPort, ResponsePort, StoredJobPort
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.request_audit import AuditedApp, Notes
from headrace.frontend.responses.api import ResponsesApi
from headrace.frontend.responses.conversations import ConversationRoutes, Conversations
from headrace.frontend.responses.items import History
from headrace.frontend.responses.routes import CompactionApi, ResponseRoutes
from headrace.frontend.responses.stored import StoredBackground
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.status import Lifecycle, StatusRoutes, error_response, form_of
from headrace.frontend.stored_videos import PATH as VIDEOS
from headrace.frontend.stored_videos import StoredVideos, VideoRoutes
from headrace.frontend.tracer import TracedApp, Tracer, tracer_of
from headrace.frontend.transcriptions import SpeechApi, Task
from headrace.frontend.videos import VideoApi, VideoCreation


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """The application, with `model_cache.run()` to be run beside it.

    While `lifecycle.draining` is True, new requests are refused.
    """

    app: ASGIApp
    model_cache: ModelCache
    lifecycle: Lifecycle
    metrics: Metrics
    renderer: ApiRenderer
    stored_background: StoredBackground | None = None
    tracer: Tracer | None = None  # to be run beside it, too


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
    results: Results | None = None
    notes: Notes | None = None


def build_frontend(
    port: JobPort,
    settings: FrontendSettings,
    *,
    metrics: Metrics | None = None,
    lifecycle: Lifecycle | None = None,
    stores: Stores | None = None,
    adapters: AdapterLoader | None = None,
    ring: KeyRing | None = None,
) -> Frontend:
    """Build the application over `port`. Nothing runs yet.

    Without `adapters` no adapter can be loaded or unloaded over HTTP, whatever the settings say. `ring` has the
    keys; by default those of the settings. Raises TracingUnusable.
    """
    stores = stores or Stores()
    stored, records, jobs, uploads = stores.responses, stores.records, stores.jobs, stores.uploads
    metrics = metrics or Metrics()
    lifecycle = lifecycle or Lifecycle()
    ring = ring or KeyRing(settings)
    metrics.tenants.hold(settings.metrics_tenants, ring.has_tenant)
    tracer = tracer_of(settings, metrics, frontend=port.id)
    model_cache = ModelCache(port.models, settings, metrics)
    chats = StoredChats(stored, records, metrics) if stored is not None and records is not None else None
    conversations = Conversations(stored, records, settings) if stored is not None and records is not None else None
    chat_api = ChatApi(model_cache, settings, metrics, chats)
    most = settings.response_max_bytes
    background = StoredBackground(stored, jobs, max_bytes=most) if stored is not None and jobs is not None else None
    responses_api = ResponsesApi(chat_api, stored, settings, metrics, background, conversations)
    history = History(stored, max_turns=settings.response_max_turns, max_bytes=settings.max_body_bytes)
    compaction = CompactionApi(chat_api, history)
    messages_api = MessagesApi(chat_api, settings)
    completions_api = CompletionApi(model_cache, settings)
    status = StatusRoutes(port, metrics, lifecycle)
    openapi = build_openapi()

    async def describe(request: Request) -> Response:
        return Response(openapi, media_type="application/json")

    form = messages_api.error_form
    hot: dict[str, ASGIApp] = {
        "/v1/responses": _Gate(GenerationEndpoint(responses_api, port, settings, metrics), lifecycle),
        "/v1/responses/compact": _Gate(GenerationEndpoint(compaction, port, settings, metrics), lifecycle),
        "/v1/responses/input_tokens": UnaryEndpoint(responses_api.count, settings),
        "/v1/messages": _Gate(GenerationEndpoint(messages_api, port, settings, metrics), lifecycle, form),
        "/v1/messages/count_tokens": UnaryEndpoint(messages_api.count, settings, form=form),
    }
    openai: dict[str, Api] = {"/v1/chat/completions": chat_api, "/v1/completions": completions_api}
    for path, api in openai.items():
        able = DurableApi(api, path, jobs, port.models, settings, metrics) if jobs is not None else api
        hot[path] = _Gate(GenerationEndpoint(able, port, settings, metrics), lifecycle)
    embeddings = EmbeddingApi(model_cache, settings)
    ollama: dict[str, Api] = {
        "/api/chat": OllamaChatApi(chat_api, port.models),
        "/api/generate": OllamaPromptApi(chat_api, model_cache, port.models, settings),
        "/api/embed": OllamaEmbedApi(embeddings, port.models),
        "/api/embeddings": OllamaVectorApi(embeddings, port.models),
    }
    for path, api in ollama.items():
        hot[path] = _Gate(GenerationEndpoint(api, port, settings, metrics), lifecycle, api.error_form)
    tasks: tuple[Task, ...] = ("transcribe", "translate")
    for path, task in zip(("/v1/audio/transcriptions", "/v1/audio/translations"), tasks, strict=True):
        speech = SpeechApi(task, chat_api, model_cache)
        hot[path] = _Gate(GenerationEndpoint(speech, port, settings, metrics, takes_form=True), lifecycle)
    ollama_models = OllamaModelRoutes(port.models)
    hot["/api/show"] = UnaryEndpoint(ollama_models.show, settings, form=OllamaForm())
    images = ImageApi(model_cache, settings, stores.results)
    hot[IMAGES] = _Gate(GenerationEndpoint(images, port, settings, metrics), lifecycle)
    video_api = VideoApi(model_cache, settings, stores.results)
    videos = StoredVideos(records, jobs) if records is not None and jobs is not None else None
    creation = VideoCreation(video_api, videos, settings)
    hot[VIDEOS] = _Gate(GenerationEndpoint(creation, port, settings, metrics, takes_form=True), lifecycle)
    pooling = pooling_routes(model_cache, settings)
    for path, api in pooling.items():
        hot[path] = _Gate(GenerationEndpoint(api, port, settings, metrics), lifecycle)
    tokens = TokensApi(model_cache, port.models)
    generate_api = TokenGenerationApi(model_cache, port.models, settings)
    generate = GenerationEndpoint(generate_api, port, settings, metrics)
    hot[GENERATE] = _Gate(generate, lifecycle)
    for path in ("/tokenize", "/v1/tokenize"):
        hot[path] = UnaryEndpoint(tokens.tokenize, settings)
    for path in ("/detokenize", "/v1/detokenize"):
        hot[path] = UnaryEndpoint(tokens.detokenize, settings)
    if adapters is not None and settings.adapter_routes:
        hot |= adapter_routes(adapters, port.models, settings)
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in hot.items()),  # reached only by other methods
        *ResponseRoutes(stored, background).routes(),
        *StreamRoutes(DurableStreams(jobs, settings) if jobs is not None else None).routes(),
        *StoredChatRoutes(chats, settings).routes(),
        *ConversationRoutes(conversations, settings).routes(),
        *(FileRoutes(uploads.files, settings, metrics).routes() if uploads is not None else ()),
        *(UploadRoutes(uploads, settings, metrics).routes() if uploads is not None else ()),
        *(BatchRoutes(stores.batches, settings).routes() if stores.batches is not None else ()),
        *VideoRoutes(videos).routes(),
        *CancelRoute(port).routes(),
        *ollama_models.routes(),
        Route("/v1/models", status.models),
        Route("/v1/models/{name:path}", status.model),
        Route("/health", status.health),
        Route("/live", status.live),
        Route("/ready", status.ready),
        Route("/metrics", status.metrics),
        Route("/ping", status.ping, methods=["GET", "POST"]),
        Route("/load", status.load),
        Route("/version", status.version),
        Route("/openapi.json", describe),
        *Pages(port, openapi).routes(),
    ]
    apis: dict[str, Api] = {
        **openai,
        "/v1/responses": responses_api,
        "/v1/messages": messages_api,
        GENERATE: generate_api,
        VIDEOS: video_api,
        **pooling,
    }
    renderer = ApiRenderer(
        apis, port.models, model_cache, settings, metrics, charge=_charge(ring, metrics), isolates=lambda: ring.isolates
    )
    if (notes := stores.notes) is not None:
        hot = {path: AuditedApp(app, notes, path) if isinstance(app, _Gate) else app for path, app in hot.items()}
    if tracer is not None:
        hot = {path: TracedApp(app, tracer, path) if isinstance(app, (_Gate, AuditedApp)) else app for path, app in hot.items()}
    labels = frozenset(route.path for route in routes if "{" not in route.path)
    starlette = Starlette(routes=routes, exception_handlers=_handlers())
    starlette.router.redirect_slashes = False
    app: ASGIApp = Observe(
        starlette,
        hot=hot,
        gate=Gate(settings, ring),
        metrics=metrics,
        routes=labels,
        access_log=settings.access_log,
        form_of=form_of,
    )
    if settings.cors_origins:
        app = _with_cors(app, settings.cors_origins)
    return Frontend(
        app=app,
        model_cache=model_cache,
        lifecycle=lifecycle,
        metrics=metrics,
        renderer=renderer,
        stored_background=background,
        tracer=tracer,
    )


def _charge(ring: KeyRing, metrics: Metrics) -> Charge:
    def charge(tenant: str, prompt: int, output: int) -> None:
        ring.quotas.charge(tenant, prompt + output)
        if ring.in_force:
            metrics.tenants.of(tenant, own=False).used(prompt, output)

    return charge


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allow web pages of these origins to call the server. Cookies are left out: no route reads them, keys come in headers."""
    return CORSMiddleware(
        app, allow_origins=list(origins), allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"], expose_headers=["*"]
    )


class _Gate:
    """Counts requests that use an engine, and refuses new ones while the process drains.

    A class, because Starlette treats a function as a request handler.
    """

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, form: ErrorForm = FrontendError.body) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._lifecycle.draining:
            await HttpExchange(scope, receive, send).send_error(Draining(retry_after_s=1.0), form=self._form)
            return
        self._lifecycle.load += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._lifecycle.load -= 1


Handler = Callable[[Request, Exception], Awaitable[Response]]


def _handlers() -> dict[int | type[Exception], Handler]:
    async def missed(request: Request, error: Exception) -> Response:
        routes = {route.path for route in request.app.routes if isinstance(route, Route)}
        return _response(missing_route(request.url.path, routes), request)

    async def wrong_method(request: Request, error: Exception) -> Response:
        path = request.url.path
        routes = [r for r in request.app.routes if isinstance(r, Route) and r.path_regex.match(path)]
        allowed = ", ".join(sorted({method for route in routes for method in route.methods or ()}))
        response = _response(MethodNotAllowed(f"{path} does not take {request.method}; it takes {allowed}"), request)
        response.headers["allow"] = allowed
        return response

    async def failed(request: Request, error: Exception) -> Response:
        seen = translate(error)
        request.scope["headrace.outcome"] = seen.code
        return _response(seen, request)

    return {404: missed, 405: wrong_method, HeadraceError: failed}


def _response(error: FrontendError, request: Request) -> Response:
    return error_response(error, form_of(request.url.path, request.headers.raw))
