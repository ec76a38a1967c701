"""Finds out which media a started vLLM accepts and which tokens they become, for the model's card.

Only vLLM knows how many tokens an item becomes: that depends on the model family and often on the item's size. So a placeholder
and images of several sizes are put through vLLM's own processor; if the result is always the same, the card has it, and an
ingress can compute the block hashes of such a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import structlog

from headrace.broker.models.cards import MediaSlot

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
