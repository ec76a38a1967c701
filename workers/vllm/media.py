"""Turns images, videos and sounds of a job into a prompt as vLLM's renderer gives it.

In our prompt an item is already as long as it will be, where the card could say so.  vLLM wants one placeholder per item and
makes it longer itself, so each span is taken back to its placeholder; what vLLM makes of it is then compared with what we had.
Items are named by their digests, 16 and 32 hex digits: under this name vLLM finds them in its caches and tells of them in its
KV events.

vLLM and PIL are imported inside the functions that use them.
"""

from __future__ import annotations

import asyncio
import io
import time
import uuid
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import msgspec
import structlog

from headrace.broker.models.cards import MediaSlot
from headrace.workers import metrics
from headrace.workers.engine import Sequence
from headrace.workers.errors import EngineError, RequestInvalid, UnsupportedByEngine, WorkerError
from headrace.workers.vllm import convert
from headrace.workers.vllm.embeddings import LentItems
from headrace.workers.vllm.load_meter import EngineRequest

# Finds out which media a started vLLM accepts and which tokens they become, for the model's card.
#
# Only vLLM knows how many tokens an item becomes: that depends on the model family and often on the item's size. So a
# placeholder and images of several sizes are put through vLLM's own processor; if the result is always the same, the card has
# it, and an ingress can compute the block hashes of such a prompt.

_log = structlog.get_logger()

KINDS = ("image", "video", "audio")
SAMPLE_TOKENS = 4096  # most tokens, roughly, of a sample video or sound
SIZES = ((336, 336), (448, 224), (1344, 896), (96, 640))  # pixels: small and large, upright and lying
_DECODERS = {"video": ("cv2", "torchcodec"), "audio": ("torchcodec", "soundfile", "av")}  # any of them will do
_FROM = {"cv2": "opencv-python-headless"}  # the package, where it has another name than the module


class NotOffered(Exception):
    """A kind of media cannot be served; the text has the reason."""


@dataclass(frozen=True, slots=True)
class MediaSupport:
    """The accepted kinds of media, and the kinds that the model accepts but the worker does not, with the reasons."""

    slots: Mapping[str, MediaSlot] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


NO_MEDIA = MediaSupport()


async def offered_media(llm: Any) -> MediaSupport:
    """Try the processor of a started `AsyncLLM`. Kinds that only the model accepts are logged with the reason."""
    renderer, model = llm.renderer, llm.model_config
    processor = renderer.mm_processor
    if processor is None:
        return NO_MEDIA
    slots: dict[str, MediaSlot] = {}
    left_out: dict[str, str] = {}
    for kind in KINDS:
        if not processor.info.allowed_mm_limits.get(kind, 0):
            continue
        try:
            slots[kind] = await _slot(llm, kind)
        except NotOffered as why:
            left_out[kind] = str(why)
            _log.warning("media.left_out", model=model.model, kind=kind, why=str(why))
    cache = getattr(renderer, "_mm_processor_only_cache", None)  # it holds what was tried out
    if cache is not None:
        cache.clear_cache()
    return MediaSupport(slots, left_out)


def missing_decoder(kind: str) -> str | None:
    """Return what to install to decode items of this kind, or None if nothing is missing."""
    modules = _DECODERS.get(kind, ())
    if not modules or any(find_spec(module) is not None for module in modules):
        return None
    return f"no decoder is installed; one of {', '.join(_FROM.get(module, module) for module in modules)} is needed"


async def _slot(llm: Any, kind: str) -> MediaSlot:
    """Build the card's entry for a kind. Raises NotOffered."""
    if llm.model_config.is_encoder_decoder:
        raise NotOffered("models with an encoder for prompts are not served with media")
    if (missing := missing_decoder(kind)) is not None:
        raise NotOffered(missing)
    text = _placeholder(llm, kind)
    given = llm.renderer.get_tokenizer().encode(text, add_special_tokens=False)
    expansions = []
    for item in _samples(llm, kind):
        try:
            made = await _rendered(llm, given, kind, item)
        except Exception as error:
            cause = error.__cause__ or error
            raise NotOffered(f"vLLM's processor refuses a sample of it: {type(cause).__name__}: {str(cause)[:300]}") from error
        expansions.append(expansion(given, made, kind))
    token, first = expansions[0]
    if kind != "image" or any(other != (token, first) for other in expansions):
        return MediaSlot(text, token)
    return MediaSlot(text, token, len(first), [] if set(first) == {token} else first)


def _placeholder(llm: Any, kind: str) -> str:
    """Return the text that vLLM's server writes for an item if the template does not. Raises NotOffered."""
    from vllm.model_executor.model_loader import get_model_cls

    try:
        text = get_model_cls(llm.model_config).get_placeholder_str(kind, 1)
    except Exception as error:
        raise NotOffered(f"vLLM has no placeholder for it: {error}") from error
    if not text:
        raise NotOffered("vLLM puts it in front of the prompt, at no place that a message could have it")
    return str(text)


def _samples(llm: Any, kind: str) -> list[Any]:
    if kind == "image":
        from PIL import Image

        return [Image.new("RGB", size, (90, 120, 150)) for size in SIZES]
    processor = llm.renderer.mm_processor
    made = processor.dummy_inputs.get_dummy_mm_data(min(llm.model_config.max_model_len, SAMPLE_TOKENS), {kind: 1}, {})
    items = made[kind]
    return [items[0] if isinstance(items, list) else items]


async def _rendered(llm: Any, ids: list[int], kind: str, item: Any) -> Any:
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {kind: [item]}}
    (made,) = await llm.renderer.render_cmpl_async([prompt], skip_mm_cache=True)
    return made


def expansion(given: list[int], made: Mapping[str, Any], kind: str) -> tuple[int, list[int]]:
    """Return (the placeholder's token, its replacement). Raises NotOffered unless exactly one token was replaced."""
    places, ids = made["mm_placeholders"].get(kind) or [], list(made["prompt_token_ids"])
    if len(places) != 1:
        raise NotOffered(f"one item has {len(places)} places in the prompt")
    begin, end = places[0].offset, places[0].offset + places[0].length
    replaced = len(given) - (len(ids) - places[0].length)
    if replaced != 1 or ids[:begin] != given[:begin] or ids[end:] != given[begin + 1 :]:
        raise NotOffered(f"its placeholder is not one token: {given} becomes {ids[:begin]} … {ids[end:]}")
    if given.count(given[begin]) != 1:
        raise NotOffered(f"token {given[begin]} stands more than once in its placeholder {given}")
    return given[begin], ids[begin:end]


DECODERS = 2  # threads
_TOLD = 300  # characters of an engine's complaint that are passed on

Kind = Literal["image", "video", "audio"]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A media item of a job, as `Generation.media` has it. `param` is its place in the client's request."""

    kind: Kind
    digest: Annotated[int, msgspec.Meta(ge=0)]
    start: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]
    data: bytes
    type: str = ""
    param: str = "messages"
    content: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""  # a 128-bit digest; older frontends send none

    @property
    def name(self) -> str:
        """Return vLLM's name of the item (`multi_modal_uuids`), which its KV events have, too. It begins with the digest."""
        return f"{self.digest:016x}{self.content}"


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """A prompt for `AsyncLLM.add_request` (`given`). `tokens` is its length without tokens emitted by an earlier run."""

    given: Any
    token_ids: list[int]
    tokens: int


def items_of(sequence: Sequence) -> list[Item]:
    """Read the items in the order of the prompt. Raises RequestInvalid for an invalid one."""
    items = []
    end = 0
    for number, given in enumerate(sequence.media):
        try:
            item = msgspec.convert(given, Item)
        except msgspec.ValidationError as error:
            raise RequestInvalid(f"media item {number}: {error}", param="messages") from None
        if item.start < end or item.start + item.length > sequence.prompt_tokens:
            raise RequestInvalid(
                f"media item {number}: tokens {item.start} to {item.start + item.length} do not lie between token {end} "
                f"and the end of a prompt of {sequence.prompt_tokens}",
                param=item.param,
            )
        if item.digest >= 1 << 64:
            raise RequestInvalid(f"media item {number}: digest {item.digest} has more than 64 bits", param=item.param)
        end = item.start + item.length
        items.append(item)
    return items


def with_placeholders(token_ids: Seq[int], items: Seq[Item], slots: Mapping[str, MediaSlot]) -> list[int]:
    """Replace each item's span by one placeholder."""
    ids: list[int] = []
    at = 0
    for item in items:
        ids += token_ids[at : item.start]
        ids.append(slots[item.kind].token)
        at = item.start + item.length
    ids += token_ids[at:]
    return ids


def check_kinds(items: Seq[Item], offer: MediaSupport) -> None:
    """Raise UnsupportedByEngine for the first item of a kind that this engine does not accept, with the reason if known."""
    for item in items:
        if item.kind in offer.slots:
            continue
        why = offer.left_out.get(item.kind) or f"the model takes: {', '.join(offer.slots) or 'text only'}"
        raise UnsupportedByEngine(f"this worker takes no {item.kind} parts: {why}", param=item.param)


class MediaReader:
    """Decodes items in threads of its own, and has vLLM process them without blocking the event loop."""

    def __init__(self, llm: Any, offer: MediaSupport) -> None:
        self._llm = llm
        self._offer = offer
        self._threads = ThreadPoolExecutor(DECODERS, thread_name_prefix="media-decode")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prompt(self, sequence: Sequence) -> MediaPrompt:
        """Build the prompt of a sequence. Raises RequestInvalid naming the part, UnsupportedByEngine naming what is missing."""
        began_s = time.perf_counter()
        items = items_of(sequence)
        check_kinds(items, self._offer)
        decoded = await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, items)
        prompt: dict[str, Any] = {
            "prompt_token_ids": with_placeholders(sequence.token_ids[: sequence.prompt_tokens], items, self._offer.slots),
            "multi_modal_data": decoded,
            "multi_modal_uuids": {kind: [item.name for item in items if item.kind == kind] for kind in decoded},
        }
        if sequence.cache_salt is not None:
            prompt["cache_salt"] = sequence.cache_salt
        given = await self._render(prompt, items)
        made = given["prompt_token_ids"]
        self._compare(sequence, items, made)
        emitted = sequence.token_ids[sequence.prompt_tokens :]
        given["prompt_token_ids"] = whole = [*made, *emitted]
        metrics.MEDIA_S.observe(time.perf_counter() - began_s)
        return MediaPrompt(given, whole, len(made))

    async def lone(self, given: Mapping[str, Any], name: str) -> Any:
        """Build the prompt of an item alone, under this name in vLLM. Raises as `prompt` does."""
        try:
            item = msgspec.convert({"digest": 0, "start": 0, "length": 1, **given}, Item)
        except msgspec.ValidationError as error:
            raise RequestInvalid(f"media item: {error}", param="messages") from None
        check_kinds([item], self._offer)
        decoded = await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, [item])
        prompt = {
            "prompt_token_ids": [self._offer.slots[item.kind].token],
            "multi_modal_data": decoded,
            "multi_modal_uuids": {item.kind: [name]},
        }
        return await self._render(prompt, [item])

    def forget(self, sequence: Sequence) -> None:
        """Drop the items of a sequence that did not reach the engine from vLLM's cache: its core may lack their bytes."""
        cache = self._llm.renderer.mm_processor_cache
        if cache is not None:
            for item in items_of(sequence):
                cache.invalidate(item.name)

    def _decode(self, items: Seq[Item]) -> dict[str, list[Any]]:
        readers = _readers(self._llm.model_config)
        check_pixels(items, most=_most_pixels())
        decoded: dict[str, list[Any]] = {}
        for item in items:
            decoded.setdefault(item.kind, []).append(_decoded(item, readers[item.kind]()))
        return decoded

    async def _render(self, prompt: dict[str, Any], items: Seq[Item]) -> Any:
        from headrace.workers.vllm.convert import translate_invalid

        param = items[0].param if len(items) == 1 else "messages"
        try:
            (given,) = await self._llm.renderer.render_cmpl_async([prompt])
        except WorkerError:
            raise
        except Exception as error:  # processors of models raise what they like on what they cannot work with
            cause = error.__cause__ or error
            invalid = translate_invalid(error) or RequestInvalid(f"{type(cause).__name__}: {cause}")
            _log.info("media.refused", why=str(invalid)[:_TOLD], items=len(items))
            raise RequestInvalid(f"{param}: vLLM cannot process it: {str(invalid)[:_TOLD]}", param=param) from error
        return given

    def _compare(self, sequence: Sequence, items: Seq[Item], made: list[int]) -> None:
        """Log tokens that differ from the card's: answers stay right, but routers look for blocks that no worker has."""
        if not all(self._offer.slots[item.kind].tokens for item in items):
            return
        if made != sequence.token_ids[: sequence.prompt_tokens]:
            metrics.MEDIA_UNEXPECTED.inc()
            _log.warning("media.expansion_differs", sequence=sequence.id, expected=sequence.prompt_tokens, tokens=len(made))


def _readers(model: Any) -> dict[str, Callable[[], Any]]:
    from vllm.multimodal.media.audio import AudioMediaIO
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.multimodal.media.video import VideoMediaIO
    from vllm.multimodal.video import get_video_loader_backend_for_processor
    from vllm.transformers_utils.processor import get_video_processor_cls_name

    given = dict(model.multimodal_config.media_io_kwargs or {})

    def image() -> Any:
        return ImageMediaIO(**given.get("image", {}))

    def video() -> Any:
        settings = dict(given.get("video", {}))
        backend = get_video_loader_backend_for_processor(get_video_processor_cls_name(model))
        if "video_backend" not in settings and backend:
            settings["video_backend"] = backend
        return VideoMediaIO(image(), **settings)

    def audio() -> Any:
        return AudioMediaIO(**given.get("audio", {}))

    return {"image": image, "video": video, "audio": audio}


def _decoded(item: Item, reader: Any) -> Any:
    """Decode an item. Raises RequestInvalid for unreadable bytes, UnsupportedByEngine if a decoder is missing."""
    try:
        return reader.load_bytes(item.data)
    except ImportError as error:
        told = missing_decoder(item.kind) or f"it needs {error.name or error}, which is not installed"
        raise UnsupportedByEngine(f"this worker cannot read {item.kind} parts: {told}", param=item.param) from error
    except Exception as error:  # decoders raise what they like on what they cannot read
        what = f"{item.type or item.kind} of {len(item.data)} bytes"
        raise RequestInvalid(f"{item.param}: the {what} cannot be read: {str(error)[:_TOLD]}", param=item.param) from error


def _most_pixels() -> int:
    from vllm import envs

    return int(envs.VLLM_MAX_IMAGE_PIXELS)


def check_pixels(items: Seq[Item], *, most: int) -> None:
    """Check that the images of a request have at most `most` pixels in all, vLLM's limit for one image (0: no limit).

    The sizes are read from the images' heads, before any is unpacked. Raises RequestInvalid.
    """
    if most <= 0:
        return
    from PIL import Image

    left = most
    for item in items:
        if item.kind != "image":
            continue
        try:
            with Image.open(io.BytesIO(item.data)) as image:
                width, height = image.size
        except Exception:  # its decoder says what is wrong  # noqa: S112
            continue
        left -= width * height
        if left < 0:
            told = f"with this image of {width} × {height} the request has more than {most} pixels in images"
            raise RequestInvalid(f"{item.param}: {told}", param=item.param)


class Prompts:
    """The prompts of one engine. Without `reader` the model takes no media, without `lent` no embeddings are passed."""

    def __init__(self, llm: Any, reader: MediaReader | None, lent: LentItems | None, *, embeds: bool) -> None:
        """`embeds`: whether prompts may be given as embeddings."""
        self._llm = llm
        self._embeds = embeds
        self._reader = reader
        self._lent = lent

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    async def prompt(self, run: EngineRequest) -> Any:
        """Build vLLM's prompt of a request. Raises RequestInvalid, UnsupportedByEngine."""
        sequence = run.sequence
        if sequence.media:
            return await self._with_media(run)
        if sequence.prompt_embeds is None:
            return convert.to_prompt(sequence)
        if not self._embeds:
            raise UnsupportedByEngine("this vLLM was started without enable_prompt_embeds", param="prompt_embeds")
        return await asyncio.to_thread(convert.to_prompt, sequence, self._llm.model_config)

    async def _with_media(self, run: EngineRequest) -> Any:
        if self._reader is None:
            raise UnsupportedByEngine("this model takes no media, only text", param="messages")
        sequence = run.sequence
        made = await self._reader.prompt(sequence)
        run.token_ids, run.prompt_tokens = made.token_ids, made.tokens
        if self._lent is not None and sequence.embeddings:
            names = [item.name for item in items_of(sequence)]
            records = {names[number]: record for number, record in sequence.embeddings.items() if number < len(names)}
            try:
                self._lent.lend(sequence.id, records)  # files in memory or a cache of the kernel
            except OSError as error:
                _log.warning("media.not_lent", sequence=sequence.id, error=str(error))  # the engine encodes them
        return made.given

    def forget(self, run: EngineRequest) -> None:
        """Drop the items of a request from vLLM's cache: vLLM has processed them, but its core may not have got them."""
        self.ended(run.sequence.id)
        if self._reader is not None and run.prompt_tokens is not None:
            self._reader.forget(run.sequence)

    def ended(self, sequence_id: str) -> None:
        """Remove what was there for this sequence alone."""
        if self._lent is not None:
            self._lent.end(sequence_id)

    async def encode(self, item: Any) -> bytes:
        """Have the encoder compute one item, and return its record. Raises RequestInvalid, UnsupportedByEngine, EngineError."""
        if self._reader is None or self._lent is None:
            raise UnsupportedByEngine("this vLLM encodes no media for others")
        from vllm import SamplingParams

        name = f"encode-{uuid.uuid4().hex}"  # one of its own: for a name that it knows, vLLM's encoder does not run
        given = await self._reader.lone(item, name)
        async for _ in self._llm.generate(given, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), name):
            pass
        record = await asyncio.to_thread(self._lent.take, name)
        if record is None:
            raise EngineError("vLLM has encoded the item and handed nothing over; its own log lines may say why")
        return record
