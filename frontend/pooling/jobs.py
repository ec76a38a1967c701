"""Turns encoded inputs into jobs, for all pooling APIs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.broker.jobs import Job
from headrace.broker.messages import Pooling, PoolingTask
from headrace.frontend.auth.caller import check_model
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.job_options import job_options_of
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.pooling.inputs import Encoded
from headrace.frontend.pooling.schema import PoolingBase
from headrace.frontend.prompts.model_cache import LoadedModel
from headrace.frontend.settings import FrontendSettings


@dataclass(frozen=True)
class PoolingOptions:
    """Options of a pooling request: its task, the length of each vector, and whether vectors are normalised.

    None leaves `dimensions` and `normalize` to the model.
    """

    task: PoolingTask
    dimensions: int | None = None
    normalize: bool | None = None


def pooling_jobs(
    request: PoolingBase,
    exchange: HttpExchange,
    model: LoadedModel,
    settings: FrontendSettings,
    inputs: Sequence[Encoded],
    options: PoolingOptions,
) -> list[Job]:
    """Make jobs of several inputs each. Choice i, counted over all jobs, is the answer to input i. Raises BadRequest."""
    check_model(exchange.scope, model.card.model)
    job_options, routing = job_options_of(request, exchange, settings, session_id=None)
    jobs: list[Job] = []
    for part in split(inputs, most=settings.job_inputs, most_tokens=settings.job_input_tokens):
        pooling = Pooling(
            task=options.task,
            inputs=[encoded.input for encoded in part],
            dimensions=options.dimensions,
            normalize=options.normalize,
            extra=request.vllm_xargs or {},
        )
        jobs.append(
            Job(
                **job_options,
                id=exchange.job_id(),
                card=model.card,
                pooling=pooling,
                prompt_tokens=sum(encoded.tokens for encoded in part),
                max_tokens=1,  # no token is generated, but 0 would mean a whole context
                choices=len(part),
                explain=routing.explain and not jobs,
            )
        )
    return jobs


def split(inputs: Sequence[Encoded], *, most: int, most_tokens: int) -> Iterator[list[Encoded]]:
    """Yield parts of at most `most` inputs. Parts of several inputs have at most `most_tokens` tokens."""
    part: list[Encoded] = []
    tokens = 0
    for encoded in inputs:
        if part and (len(part) >= most or tokens + encoded.tokens > most_tokens):
            yield part
            part, tokens = [], 0
        part.append(encoded)
        tokens += encoded.tokens
    if part:
        yield part


def check_inputs(count: int, settings: FrontendSettings, *, param: str) -> None:
    """Refuse a request with too many inputs. Raises BadRequest."""
    if count > settings.max_inputs:
        raise BadRequest(f"at most {settings.max_inputs} inputs in one request, this one has {count}", param=param)


def activation_of(request: PoolingBase) -> bool | None:
    """Return `use_activation`, also under its older name. Raises BadRequest if both are given and differ."""
    if request.normalize is not None and request.use_activation not in (None, request.normalize):
        raise BadRequest("normalize is another name of use_activation; the two contradict each other", param="normalize")
    return request.normalize if request.use_activation is None else request.use_activation


def refuse_formats(embed_dtype: str | None, endianness: str | None) -> None:
    """Refuse every form of vectors but f32, little endian. Raises BadRequest."""
    if embed_dtype not in (None, "float32"):
        raise unsupported("embed_dtype", f"{embed_dtype!r} is not supported here: float32 only")
    if endianness not in (None, "native", "little"):
        raise unsupported("endianness", f"{endianness!r} is not supported here: little only")
