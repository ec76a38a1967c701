"""Defines model cards, which tell an ingress all it needs of a model, so that it needs no model files on its own disk.

The card is stored in the bucket `<prefix>_models` under its pool id; the files that it names (tokenizer, chat template) are in
the object store of the same name, addressed by their SHA-256 digest, so they are stored once and can be cached forever.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Annotated, Any

import msgspec
import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import CardForged, CardKeyUnusable, MalformedMessage, WireError
from headrace.broker.messages.requests import LONGEST_NAME, Count, Name, Record, Token, TokenId, Tokens, UnixTime

LONGEST_ADAPTER_NAME = 256  # characters
MOST_PLACEHOLDERS = 1_000_000  # ids that one media item takes in a prompt
UNLOAD_GRACE_S = 60.0  # default time for runs on an adapter to finish before it is unloaded

Placeholders = Annotated[int, msgspec.Meta(ge=0, le=MOST_PLACEHOLDERS)]


def bad_adapter_name(name: str) -> str:
    """Return why `name` cannot name an adapter, or "" if it can."""
    if not 1 <= len(name) <= LONGEST_ADAPTER_NAME or not name.isprintable() or name != name.strip():
        return f"{name[:LONGEST_ADAPTER_NAME]!r} is no name for an adapter: 1 to {LONGEST_ADAPTER_NAME} printable characters"
    return ""


def check_card_key(card: ModelCard, key: str) -> None:
    """Raise MalformedMessage for a card that is not stored under its own pool: it would speak for another one."""
    if card.pool != key:
        raise MalformedMessage(f"the card of pool {card.pool!r} is stored under {key[:80]!r}")


class CardFile(msgspec.Struct, frozen=True):
    """A file of a model card: object name in the store, SHA-256 (hex) and size in bytes."""

    object: Name
    digest: str
    size: Count


class MediaSlot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The placeholder of media items of one kind (image, video, audio) in a prompt.

    `text` is the placeholder as templates write it; the tokenizer turns it into the one id `token`.  An item takes `tokens` of
    these ids in the prompt, or the sequence `ids` if the engine puts other ids between or around them; `tokens` 0 = only the
    engine knows the number, and block hashes end where the first such item begins.
    """

    text: str
    token: TokenId
    tokens: Placeholders = 0
    ids: Annotated[list[TokenId], msgspec.Meta(max_length=MOST_PLACEHOLDERS)] = []


class ModelCard(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A served model. `files` has "tokenizer.json" and, if the model has one, "chat_template.jinja"."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]  # the name that clients use
    pool: Token
    namespace: str = "default"
    kinds: list[str] = msgspec.field(default_factory=lambda: ["chat", "completion"])  # also: embedding, score, classify
    labels: list[str] = []  # names of the classes of `classify`, by index
    context_length: Tokens
    block_size: Tokens  # of the pool; a worker with another one is refused
    vocab_size: Tokens = 0
    eos_token_ids: list[TokenId] = []
    bos_token: str | None = None  # passed to the chat template
    eos_token: str | None = None
    files: dict[str, CardFile] = {}
    template_kwargs: dict[str, Any] = {}
    default_sampling: dict[str, Any] = {}  # the model's own generation defaults, for requests that leave them out
    default_max_tokens: Tokens | None = None  # None = up to the context length
    tool_parser: str | None = None  # parses tool calls out of answers, in the worker; None = there is none
    reasoning_parser: str | None = None
    prompt_embeds: bool = False  # the model accepts prompts as embeddings
    signature: Annotated[bytes, msgspec.Meta(max_length=32)] = b""  # HMAC-SHA-256 under the deployment's key; empty = none
    media: dict[str, MediaSlot] = {}  # kinds of media that the model accepts in messages
    aliases: list[str] = []
    adapters: list[str] = []  # adapters that its workers have or had: known until they are unloaded everywhere
    owner: str = "headrace"
    created: UnixTime = 0.0


# Signs model cards with a key of the deployment, and checks the signatures of those that are read.
#
# The signature is an HMAC-SHA-256 of the whole card but for its adapters, which come and go and are named by leases, too. The
# card has the SHA-256 of each of its files, so that tokenizer and template are signed with it.

LEAST_KEY_BYTES = 32


def read_card_key(path: str | None) -> bytes:
    """Return the key in this file, empty without one. Raises CardKeyUnusable."""
    if path is None:
        return b""
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise CardKeyUnusable(f"the key of model cards {path} cannot be read: {error.strerror}") from None
    if len(key) < LEAST_KEY_BYTES:
        raise CardKeyUnusable(f"the key of model cards {path} has {len(key)} bytes, at least {LEAST_KEY_BYTES} are needed")
    return key


def signed(card: ModelCard, key: bytes) -> ModelCard:
    """Return the card with its signature, as it is without a key."""
    return msgspec.structs.replace(card, signature=_signature(card, key)) if key else card


def check_signature(card: ModelCard, key: bytes) -> None:
    """Raise CardForged unless the card was signed with this key. Without a key every card is taken."""
    if key and not hmac.compare_digest(card.signature, _signature(card, key)):
        how = "with another key" if card.signature else "not at all"
        raise CardForged(f"the card of {card.model[:80]!r} in pool {card.pool} was signed {how}, or changed since")


def _signature(card: ModelCard, key: bytes) -> bytes:
    bare = msgspec.structs.replace(card, adapters=[], signature=b"")
    return hmac.new(key, encode(bare), hashlib.sha256).digest()


log = structlog.get_logger()


def readable_card(key: str, value: bytes, *, signed_with: bytes = b"") -> ModelCard | None:
    """Decode the card that is stored under `key`. Returns None for a malformed one, which is logged and counted.

    `signed_with`: the key that must have signed it; empty = none need have.
    """
    try:
        card = decode(ModelCard, value)
        check_card_key(card, key)
        check_signature(card, signed_with)
    except CardForged as error:
        metrics.FORGED.labels("card").inc()
        log.error("card.forged", pool=key, error=str(error))
        return None
    except WireError as error:
        metrics.MALFORMED.labels("card").inc()
        log.error("card.malformed", pool=key, error=str(error))
        return None
    return card
