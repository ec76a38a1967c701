"""Defines model cards, which tell an ingress all it needs of a model, so that it needs no model files on its own disk.

The card is stored in the bucket `<prefix>_models` under its pool id; the files that it names (tokenizer, chat template) are in
the object store of the same name, addressed by their SHA-256 digest, so they are stored once and can be cached forever.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from headrace.broker.errors import MalformedMessage
from headrace.broker.messages import Record
from headrace.broker.messages.base import LONGEST_NAME, Count, Name, Token, TokenId, Tokens, UnixTime

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
