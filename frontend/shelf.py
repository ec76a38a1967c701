"""Models made ready to take prompts: tokenizer loaded, template compiled, once per card.

Loading a tokenizer takes a tenth of a second and more, so it happens in a thread, and as soon as a model appears rather than
when its first request comes.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from broker.cards import ModelCard
from broker.codec import encode
from broker.errors import UnknownModel
from frontend.errors import FrontendError, ModelUnusable
from frontend.ports import Models, Served
from frontend.settings import FrontendSettings
from frontend.templates import ChatTemplate
from frontend.tokenize import PromptEncoder

log = structlog.get_logger()

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_TEMPLATE_NAMES = ("unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """`fingerprint` changes with anything in the card."""

    card: ModelCard
    encoder: PromptEncoder
    template: ChatTemplate | None
    fingerprint: str


class ModelShelf:
    """The ready models. Run `run` next to the server; without it models are loaded by their first request."""

    def __init__(self, models: Models, settings: FrontendSettings) -> None:
        self._models = models
        self._settings = settings
        self._ready: dict[str, ReadyModel] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._executor = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        self._changed = asyncio.Event()
        models.on_change(self._changed.set)

    def names(self) -> set[str]:
        """Models that are loaded."""
        return set(self._ready)

    async def get(self, name: str) -> ReadyModel:
        """Raises UnknownModel, ModelUnusable."""
        served = self._models.get(name)
        ready = self._ready.get(served.card.model)
        if ready is not None and (ready.card is served.card or ready.card == served.card):
            return ready
        return await self._load(served)

    async def run(self) -> None:
        """Load models as they appear, drop those that are gone, until cancelled."""
        while True:
            self._changed.clear()
            names = self._models.names()
            for gone in self._ready.keys() - set(names):
                del self._ready[gone]
                self._locks.pop(gone, None)
            for name in names:
                try:
                    await self.get(name)
                except (FrontendError, UnknownModel) as error:
                    log.warning("model.unusable", model=name, error=str(error))
            await self._changed.wait()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _load(self, served: Served) -> ReadyModel:
        card = served.card
        async with self._locks.setdefault(card.model, asyncio.Lock()):
            ready = self._ready.get(card.model)
            if ready is not None and ready.card == card:
                return ready
            began = time.perf_counter()
            loop = asyncio.get_running_loop()
            ready = await loop.run_in_executor(self._executor, _build, served, self._executor, self._settings)
            self._ready[card.model] = ready
            log.info("model.loaded", model=card.model, seconds=round(time.perf_counter() - began, 3))
            return ready


def _build(served: Served, executor: Executor, settings: FrontendSettings) -> ReadyModel:
    card, files = served.card, served.files
    if TOKENIZER not in files:
        raise ModelUnusable(f"the card of {card.model!r} has no {TOKENIZER}")
    encoder = PromptEncoder(files[TOKENIZER], card, executor=executor, inline_bytes=settings.inline_prompt_bytes)
    config = _config(files, card)
    source = _template_source(files, config)
    names = {n: config[n] for n in _TEMPLATE_NAMES if isinstance(config.get(n), str)}
    names |= {n: token for n, token in (("bos_token", card.bos_token), ("eos_token", card.eos_token)) if token is not None}
    names |= card.template_kwargs
    template = ChatTemplate(source, names=names) if source is not None else None
    return ReadyModel(card, encoder, template, "fp_" + hashlib.sha256(encode(card)).hexdigest()[:10])


def _config(files: Mapping[str, bytes], card: ModelCard) -> dict[str, Any]:
    if CONFIG not in files:
        return {}
    try:
        return msgspec.json.decode(files[CONFIG], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ModelUnusable(f"{CONFIG} of {card.model!r} is not valid: {error}") from None


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    if TEMPLATE in files:
        return files[TEMPLATE].decode()
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name: the one called "default" is meant for chat
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    return source if isinstance(source, str) else None
