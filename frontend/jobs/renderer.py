"""Renders stored jobs by the APIs that answer HTTP requests, so that both get the same answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import cast

import msgspec
import structlog

from headrace.broker.durable.errors import JobRejected
from headrace.broker.durable.stored_job import StoredJob
from headrace.broker.errors import AdmissionError, BrokerUnavailable
from headrace.broker.jobs import Job
from headrace.frontend.errors import BadRequest, ErrorForm, FrontendError, StatusForm, translate
from headrace.frontend.generation.endpoint import Api
from headrace.frontend.generation.plan import Plan
from headrace.frontend.jobs.bodies import stream_body, whole_body
from headrace.frontend.jobs.envelopes import plan_envelope
from headrace.frontend.jobs.job_exchange import JobExchange
from headrace.frontend.jobs.rendered_answer import Charge, RenderedAnswer
from headrace.frontend.metrics import Metrics
from headrace.frontend.ports import Models
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import REQUEST_CLASSES, RequestClass, slug

log = structlog.get_logger()

LEAST_DEADLINE_S = 0.001


class ApiRenderer:
    """Renders the jobs of every path that has an API here, and those of Envelopes."""

    def __init__(
        self,
        apis: Mapping[str, Api],
        models: Models,
        model_cache: ModelCache,
        settings: FrontendSettings,
        metrics: Metrics,
        *,
        charge: Charge | None = None,
        isolates: Callable[[], bool] = lambda: False,
    ) -> None:
        """`apis` by path. `charge` takes the tenant of each job and the tokens that it used.

        `isolates`: the prefix caches of tenants are kept apart now.
        """
        self._charge = charge
        self._isolates = isolates
        self._metrics = metrics
        self._apis = apis
        self._models = models
        self._model_cache = model_cache
        self._settings = settings

    def serves(self, model_slug: str) -> bool:
        """Return whether a model, or an alias or adapter that has a worker, is of this slug."""
        return any(slug(name) == model_slug for name in (*self._models.names(), *self._models.listed_names()))

    async def render(self, job: StoredJob, run: str) -> RenderedAnswer:
        """Plan a job for the run of this id.

        Raises JobRejected for a job that can never run as it is, AdmissionError for one that cannot run now.
        """
        form: ErrorForm = FrontendError.body
        try:
            api = self._api(job)
            form = api.error_form if api is not None else form
            plan = await self._plan(job, api, JobExchange(job, run, isolated=self._isolates()))
            _check_stream(job, plan)
        except JetStreamError as error:
            raise BrokerUnavailable(str(error)) from error
        except Exception as error:
            if isinstance(error, AdmissionError) and error.retriable:
                raise
            seen = translate(error)
            if seen.retriable:
                raise BrokerUnavailable(str(seen)) from error
            if type(seen) is FrontendError:
                log.error("job.not_rendered", request_id=run, exc_info=error)
            raise _rejected(seen, form) from error
        requests = [_with_options(request, job) for request in plan.jobs]
        return RenderedAnswer(job, plan, requests, form, self._metrics, charge=self._charge)

    def _api(self, job: StoredJob) -> Api | None:
        """Return the API of a job; None for an Envelope. Raises BadRequest."""
        if job.envelope is not None:
            return None
        api = self._apis.get(job.endpoint)
        if api is None:
            paths = ", ".join(sorted(self._apis))
            raise BadRequest(f"no job can be for {job.endpoint[:200]!r}; jobs are for {paths}", param="endpoint")
        return api

    async def _plan(self, job: StoredJob, api: Api | None, exchange: JobExchange) -> Plan:
        if api is None:
            assert job.envelope is not None  # noqa: S101  # `_api` has looked
            return await plan_envelope(job.envelope, exchange, self._model_cache, self._settings)
        body = stream_body(job.body) if job.durable else whole_body(job.body)
        await exchange.take_body(body, self._settings)
        return await api.plan(body, exchange)


def _check_stream(job: StoredJob, plan: Plan) -> None:
    """Refuse a durable stream of an API that has none, or of several requests. Raises BadRequest."""
    if not job.durable:
        return
    if plan.whole is None:
        raise BadRequest(f"an answer of {job.endpoint[:200]} cannot be a durable stream", param="stream")
    if len(plan.jobs) > 1:
        raise BadRequest(f"a durable stream has one prompt, this one has {len(plan.jobs)}", param="prompt")


def _with_options(request: Job, job: StoredJob) -> Job:
    """Return a request with the class and the deadline of the stored job in place of those in its body."""
    known = job.request_class in REQUEST_CLASSES
    return msgspec.structs.replace(
        request,
        name=job.token,
        tenant=job.tenant,
        request_class=cast("RequestClass", job.request_class) if known else "std",
        deadline_s=max(job.deadline - time.time(), LEAST_DEADLINE_S),
        explain=False,
    )


def _rejected(error: FrontendError, form: ErrorForm) -> JobRejected:
    status = form.status(error) if isinstance(form, StatusForm) else error.status
    return JobRejected(str(error), status=status, body=form(error))
