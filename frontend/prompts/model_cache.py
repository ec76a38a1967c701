"""Caches loaded models: per card a tokenizer and a compiled template.

Loading a tokenizer takes a tenth of a second and more, so it happens in a thread, and as soon as a model appears instead of
with its first request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import structlog

from headrace.broker.codec import encode
from headrace.broker.errors import UnknownModel
from headrace.broker.models.cards import ModelCard
from headrace.frontend.errors import BadRequest, FrontendError, ModelUnusable
from headrace.frontend.http.field_checks import model_name
from headrace.frontend.metrics import Metrics
from headrace.frontend.ports import Models, Served
from headrace.frontend.prompts.prompt_cache import PromptCache
from headrace.frontend.prompts.prompt_encoder import PromptEncoder
from headrace.frontend.prompts.templates import ChatTemplate
from headrace.frontend.prompts.tokenizer_files import ModelFiles
from headrace.frontend.settings import FrontendSettings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to encode prompts. `fingerprint` changes with everything in the card but its adapters."""

    card: ModelCard
    encoder: PromptEncoder
    template: ChatTemplate | None
    fingerprint: str
    executor: Executor
    inline_bytes: int
    adapter: str | None = None

    @property
    def name(self) -> str:
        """Return the name of the model in answers: the adapter's, if there is one."""
        return self.adapter or self.card.model

    def check_kind(self, kind: str) -> None:
        """Refuse a kind of request that this model does not serve. Raises BadRequest."""
        if kind not in self.card.kinds:
            served = ", ".join(self.card.kinds)
            message = f"{self.card.model!r} does not serve {kind} requests, only: {served}"
            raise BadRequest(message, param="model", code="wrong_kind")

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Call `ChatTemplate.render`, off the event loop if the conversation is long.

        Raises BadRequest, also if the model has no template.
        """
        if self.template is None:
            message = f"{self.card.model!r} has no chat template; use /v1/completions"
            raise BadRequest(message, param="model", code="no_chat_template")
        work = partial(
            self.template.render,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            extra=extra,
        )
        if not _is_heavy([messages, tools, documents, extra], self.inline_bytes):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)


class ModelCache:
    """The loaded models. Run `run` beside the server; without it models are loaded by their first request."""

    def __init__(self, models: Models, settings: FrontendSettings, metrics: Metrics | None = None) -> None:
        self._models = models
        self._settings = settings
        self._prompt_cache = _prompt_cache(settings, metrics)
        self._ready: dict[str, LoadedModel] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._broken: dict[str, tuple[ModelCard, ModelUnusable]] = {}  # models that failed to load, and with which card
        self._executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        self._on_refused: Callable[[], None] = metrics.slow_prompts.inc if metrics is not None else lambda: None
        self._speedup: asyncio.Future[None] | None = None
        self._changed = asyncio.Event()
        models.on_change(self._changed.set)

    def names(self) -> set[str]:
        """Return the names of the loaded models."""
        return set(self._ready)

    async def get(self, name: str | None) -> LoadedModel:
        """Return a model, loading it if necessary; without a name, the only one that is served.

        Raises UnknownModel, ModelUnusable, and BadRequest if there is no name and not exactly one served model.
        """
        served = self._models.get(model_name(name, self._models))
        ready = self._ready.get(served.card.model)
        if ready is None or ready.card is not served.card:
            ready = self._unchanged(ready, served.card) or await self._load(served)
        if served.adapter is None:
            return ready
        return dataclasses.replace(ready, adapter=served.adapter, encoder=ready.encoder.for_adapter(served.adapter))

    async def run(self) -> None:
        """Load models as they appear and drop models that are gone, until cancelled."""
        while True:
            self._changed.clear()
            names = self._models.names()
            for gone in self._ready.keys() - set(names):
                del self._ready[gone]
                self._locks.pop(gone, None)
                self._broken.pop(gone, None)
            for name in names:
                try:
                    await self.get(name)
                except (FrontendError, UnknownModel) as error:
                    log.warning("model.unusable", model=name, error=str(error))
            await self._changed.wait()

    def _unchanged(self, ready: LoadedModel | None, card: ModelCard) -> LoadedModel | None:
        """Return the loaded model if nothing but the adapters has changed in the card."""
        if ready is None or msgspec.structs.replace(ready.card, adapters=card.adapters) != card:
            return None
        ready = self._ready[card.model] = dataclasses.replace(ready, card=card)
        return ready

    def close(self) -> None:
        """Stop the tokenizer threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _load(self, served: Served) -> LoadedModel:
        card = served.card
        async with self._locks.setdefault(card.model, asyncio.Lock()):
            unchanged = self._unchanged(self._ready.get(card.model), card)
            if unchanged is not None:
                return unchanged
            began = time.perf_counter()
            loop = asyncio.get_running_loop()
            broken = self._broken.get(card.model)
            if broken is not None and broken[0] == card:
                raise broken[1]
            try:
                ready = await loop.run_in_executor(self._executor, self._build, served)
            except ModelUnusable as error:
                self._broken[card.model] = (card, error)
                raise
            except Exception as error:  # the files of one model must not end the frontend, nor keep it from the others
                log.warning("model.failed", model=card.model, error=f"{type(error).__name__}: {error}"[:500], exc_info=error)
                unusable = ModelUnusable(f"the files of {card.model!r} cannot be loaded ({type(error).__name__})")
                self._broken[card.model] = (card, unusable)
                raise unusable from None
            self._broken.pop(card.model, None)
            self._ready[card.model] = ready
            log.info("model.loaded", model=card.model, seconds=round(time.perf_counter() - began, 3))
            if self._settings.fast_tokenizer:  # not awaited: until it is done, prompts only take longer
                self._speedup = loop.run_in_executor(self._executor, ready.encoder.use_fast_tokenizer, self._on_refused)
            return ready

    def _build(self, served: Served) -> LoadedModel:
        card, executor, inline_bytes = served.card, self._executor, self._settings.inline_prompt_bytes
        files = ModelFiles.read(served.files, card.model)
        encoder = PromptEncoder(
            files.tokenizer,
            card,
            executor=executor,
            inline_bytes=inline_bytes,
            cache=self._prompt_cache,
            special_tokens=files.special_tokens,
        )
        of_card = {n: token for n, token in (("bos_token", card.bos_token), ("eos_token", card.eos_token)) if token is not None}
        names = {**of_card, **files.names, **card.template_kwargs}
        template = ChatTemplate(files.templates, names=names) if files.templates else None
        fingerprint = "fp_" + hashlib.sha256(encode(msgspec.structs.replace(card, adapters=[]))).hexdigest()[:10]
        return LoadedModel(card, encoder, template, fingerprint, executor, inline_bytes)


def _prompt_cache(settings: FrontendSettings, metrics: Metrics | None) -> PromptCache | None:
    if not settings.prompt_cache_bytes:
        return None
    if metrics is None:
        return PromptCache(settings.prompt_cache_bytes)
    cache = PromptCache(settings.prompt_cache_bytes, on_reuse=metrics.count_prefix)
    metrics.prefix_bytes.set_function(lambda: cache.size)
    return cache


def _is_heavy(values: Sequence[object], limit: int) -> bool:
    """Return True if the values have more characters than the limit. Every value that is no text counts as a few."""
    left = [value for value in values if value]  # most requests have messages only
    while left:
        value = left.pop()
        if isinstance(value, str):
            limit -= len(value)
        elif isinstance(value, dict):  # concrete types, because checks of abstract ones cost more than all else here
            limit -= 8 * len(value)
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            limit -= 8 * len(value)
            left.extend(value)
        if limit < 0:
            return True
    return False
