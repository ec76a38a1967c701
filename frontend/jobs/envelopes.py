"""Plans jobs that came as an Envelope: token ids in, token ids out, in the answer form of `/inference/v1/generate`."""

from __future__ import annotations

import msgspec

from headrace.broker.codec import decode, unpack_u32
from headrace.broker.durable.names import job_of_run
from headrace.broker.errors import WireError
from headrace.broker.jobs import Job
from headrace.broker.messages import Envelope, Generation
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.plan import Plan
from headrace.frontend.generation.request_checks import check_choices
from headrace.frontend.generation.request_size import check_size
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.prompt_encoder import LengthLimit
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.tokens.generation_writers import TokenEvents, TokenOptions, TokenWriter
from headrace.frontend.writers.sse import Head
from headrace.frontend.writers.usage import UsageCounter


async def plan_envelope(
    envelope: Envelope, exchange: HttpExchange, model_cache: ModelCache, settings: FrontendSettings
) -> Plan:
    """Plan the request of an Envelope. Raises a FrontendError or an AdmissionError."""
    generation = _generation(envelope)
    check_choices(envelope.choices, 1, settings)
    model = await model_cache.get(generation.adapter or envelope.adapter or envelope.model)
    model.check_kind("completion")
    card, sampling = model.card, generation.sampling
    wanted = sampling.max_tokens or envelope.max_tokens or None
    limit = LengthLimit(context_length=card.context_length, wanted=wanted, truncate=None, param="token_ids")
    salt = exchange.salt(generation.cache_salt)
    prompt = await model.encoder.take_ids(unpack_u32(generation.token_ids), limit=limit, salt=salt)
    check_size(generation, None, choices=envelope.choices, prompt_tokens=prompt.tokens)
    max_tokens = wanted or card.default_max_tokens or card.context_length - prompt.tokens
    job = Job(
        id=exchange.job_id(),
        card=card,
        generation=msgspec.structs.replace(
            generation,
            sampling=msgspec.structs.replace(sampling, max_tokens=max_tokens),
            adapter=model.adapter,
            parse=None,
            cache_salt=salt,
        ),
        prompt_tokens=prompt.tokens,
        max_tokens=max_tokens,
        hashes=prompt.hashes,
        choices=envelope.choices,
        priority=envelope.priority,
        adapter=model.adapter or "",
        session=envelope.session,
        affinity=envelope.affinity,
        worker=envelope.worker,
        ttft_target_s=envelope.ttft_target_s,
        itl_target_s=envelope.itl_target_s,
        agent_priority=envelope.agent_priority,
        require=envelope.require,
        prefer=envelope.prefer,
    )
    head = Head(f"generate-tokens-{job_of_run(job.id)}", exchange.created, model.name, model.fingerprint)
    counter = UsageCounter([prompt.tokens], envelope.choices)
    options = TokenOptions(mode="tokens", choices=envelope.choices, logprobs=generation.logprobs)
    if not exchange.durable:
        return Plan([job], TokenWriter(head, counter, options), counter)
    return Plan([job], TokenEvents(head, counter, options), counter, whole=TokenWriter(head, counter.fresh(), options))


def _generation(envelope: Envelope) -> Generation:
    """Return the payload of an Envelope. Raises BadRequest for one that cannot be a stored job."""
    if envelope.kind != "generate":
        raise unsupported("kind", f"{envelope.kind!r} is not supported in a job: use /v1/embeddings with the text or its ids")
    if envelope.spill is not None:
        raise unsupported("spill", "is not supported in a job: the payload must be in the message")
    if envelope.choices < 1:
        raise BadRequest(f"choices must be at least 1, got {envelope.choices}", param="choices")
    try:
        generation = decode(Generation, envelope.payload)
        ids = len(generation.token_ids)
    except WireError as error:
        raise BadRequest(f"the payload is not a Generation: {error}", param="payload") from None
    if generation.media or generation.prompt_embeds:
        raise unsupported("media", "and embeddings are not supported in an Envelope: use the body of /v1/chat/completions")
    if not ids or ids % 4:
        raise BadRequest(f"token_ids must be u32, little endian, and not empty; got {ids} bytes", param="token_ids")
    return generation
