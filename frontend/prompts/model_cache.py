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
from headrace.broker.torch_tensors import TensorUnreadable, read_matrix
from headrace.frontend.chat_schema import CompletionRequest
from headrace.frontend.errors import BadRequest, FrontendError, ModelUnusable
from headrace.frontend.http.bodies import model_name, unsupported
from headrace.frontend.metrics import Metrics
from headrace.frontend.ports import Models, Served
from headrace.frontend.prompts.media import Malformed, TooMuch, decode_base64
from headrace.frontend.prompts.prompt_encoder import LengthLimit, Prompt, PromptCache, PromptEncoder
from headrace.frontend.prompts.templates import DEFAULT, ChatTemplate
from headrace.frontend.settings import FrontendSettings

# Reads the tokenizer files of a model as transformers does: templates by name, and the names of special tokens.

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"  # of models whose configuration does not list the special tokens
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates/"
OLD_TEMPLATE = "chat_template.json"
_STANDARD = frozenset({"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The tokenizer of a model. `names` has the special tokens that templates know by name; `special_tokens` has all."""

    tokenizer: bytes
    templates: Mapping[str, str]
    names: Mapping[str, str]
    special_tokens: tuple[str, ...]

    @classmethod
    def read(cls, files: Mapping[str, bytes], model: str) -> ModelFiles:
        """Read the files of a model. Raises ModelUnusable naming the file that is missing or not valid."""
        if TOKENIZER not in files:
            raise ModelUnusable(f"the card of {model!r} has no {TOKENIZER}")
        config = _json(files, CONFIG, model)
        if "added_tokens_decoder" not in config:
            config |= _json(files, SPECIAL_TOKENS, model)
        named = {key: text for key, value in config.items() if key.endswith("_token") and (text := _text(value, key))}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
        if isinstance(extra, dict):
            named |= {str(key): text for key, value in extra.items() if (text := _text(value))}
            extra = ()
        more = [text for value in extra if (text := _text(value))] if isinstance(extra, list) else []
        return cls(
            tokenizer=files[TOKENIZER],
            templates=_templates(files, config, model),
            names=named,
            special_tokens=(*named.values(), *more),
        )


def _templates(files: Mapping[str, bytes], config: Mapping[str, Any], model: str) -> dict[str, str]:
    """Return the templates: from their files, else from the configuration, else from the file of older models."""
    try:
        found = {
            name.removeprefix(MORE_TEMPLATES).removesuffix(".jinja"): data.decode()
            for name, data in files.items()
            if name.startswith(MORE_TEMPLATES) and name.endswith(".jinja")
        }
        if TEMPLATE in files:
            found[DEFAULT] = files[TEMPLATE].decode()
    except UnicodeDecodeError as error:
        raise ModelUnusable(f"a chat template of {model!r} is not valid: {error}") from None
    if found:
        return found
    for source in (config.get("chat_template"), _json(files, OLD_TEMPLATE, model).get("chat_template")):
        if isinstance(source, str):
            return {DEFAULT: source}
        if isinstance(source, list):
            return {
                entry["name"]: entry["template"]
                for entry in source
                if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
            }
    return {}


def _json(files: Mapping[str, bytes], name: str, model: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        return msgspec.json.decode(files[name], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ModelUnusable(f"{name} of {model!r} is not valid: {error}") from None


def _text(value: object, key: str = "") -> str | None:
    """Return a token as text. Older configurations write tokens with a standard name as a map."""
    if isinstance(value, dict) and (not key or key in _STANDARD or value.get("__type") == "AddedToken"):
        value = value.get("content")
    return value if isinstance(value, str) else None


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
        size: int,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Call `ChatTemplate.render`, off the event loop if the request is long: `size` is that of its body in bytes.

        Raises BadRequest, also if the model has no template.
        """
        if self.template is None:
            message = f"{self.card.model!r} has no chat template; use /v1/completions"
            raise BadRequest(message, param="model", code="no_chat_template")
        render = partial(
            self.template.render,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            extra=extra,
        )
        if size <= self.inline_bytes:
            return render()
        return await asyncio.get_running_loop().run_in_executor(self.executor, render)


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


PARAM = "prompt_embeds"


def listed(request: CompletionRequest) -> list[str]:
    """Return the embeddings of a request. Raises BadRequest for parameters that cannot be combined with them."""
    embeds = request.prompt_embeds
    if embeds is None:
        return []
    if request.echo:
        raise BadRequest("echo cannot be combined with prompt_embeds: there is no text", param="echo")
    if request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs cannot be combined with prompt_embeds: there are no tokens", param="prompt_logprobs")
    return [embeds] if isinstance(embeds, str) else embeds


async def prompt_of(text: str, model: LoadedModel, limit: LengthLimit, settings: FrontendSettings) -> Prompt:
    """Make a prompt of embeddings. Only the length is read from the file; nothing is unpickled.

    Raises BadRequest for a model that does not support embeddings, and for anything but a matrix; ContextTooLong.
    """
    if not model.card.prompt_embeds:
        raise unsupported(PARAM, f"is not supported by {model.name!r}: its workers take tokens only")

    def work() -> Prompt:
        try:
            file = decode_base64(text, limit=settings.max_body_bytes)
            tokens = read_matrix(file).shape[0]
        except (Malformed, TooMuch, TensorUnreadable) as error:
            raise BadRequest(f"{PARAM}: {error}", param=PARAM) from None
        return Prompt(tokens, b"", b"", embeds=file)

    prompt = await model.encoder.aside(work, size=len(text))
    limit.check(prompt.tokens)
    return prompt
