"""The names of spans' attributes: those of OpenTelemetry's GenAI, HTTP and messaging conventions, and ours.

The GenAI conventions still change; what Headrace sends of them stands here and nowhere else.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK_S = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
METHOD = "http.request.method"
ROUTE = "http.route"
STATUS = "http.response.status_code"

REQUEST_ID = "headrace.request.id"
CLIENT_REQUEST_ID = "headrace.request.client_id"
POOL = "headrace.pool"
TENANT = "headrace.tenant"
REQUEST_CLASS = "headrace.request_class"
ATTEMPTS = "headrace.attempts"
LEVEL = "headrace.service_level"
ATTEMPT = "headrace.attempt"
WORKER = "headrace.worker"
ROUTER = "headrace.router"
RANK = "headrace.worker.rank"
PREFILL_WORKER = "headrace.prefill.worker"
UNCACHED_PREDICTED = "headrace.prefill.predicted_tokens"
UNCACHED = "headrace.prefill.tokens"

MESSAGING_SYSTEM = "messaging.system"
MESSAGING_DESTINATION = "messaging.destination.name"
MESSAGE_ID = "messaging.message.id"

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/inference/v1/generate": "text_completion",
    "/v1/images/generations": "generate_content",
    "/v1/videos": "generate_content",
    "/v1/audio/transcriptions": "generate_content",
    "/v1/audio/translations": "generate_content",
}
_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/responses/compact", "/v1/messages", "/api/chat")


def operation(route: str) -> str:
    """Return the GenAI operation of a generating route; routes of vectors and scores are `embeddings`."""
    return "chat" if route in _CHATS else _OPERATIONS.get(route, "embeddings")
