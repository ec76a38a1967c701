"""Defines model cards, which tell an ingress all it needs of a model, so that it needs no model files on its own disk.

The card is stored in the bucket `<prefix>_models` under its pool id; the files that it names (tokenizer, chat template) are in
the object store of the same name, addressed by their SHA-256 digest, so they are stored once and can be cached forever.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.broker.messages import Record

LONGEST_ADAPTER_NAME = 256  # characters
UNLOAD_GRACE_S = 60.0  # default time for runs on an adapter to finish before it is unloaded


def bad_adapter_name(name: str) -> str:
    """Return why `name` cannot name an adapter, or "" if it can."""
    if not 1 <= len(name) <= LONGEST_ADAPTER_NAME or not name.isprintable() or name != name.strip():
        return f"{name[:LONGEST_ADAPTER_NAME]!r} is no name for an adapter: 1 to {LONGEST_ADAPTER_NAME} printable characters"
    return ""


class CardFile(msgspec.Struct, frozen=True):
    """A file of a model card: object name in the store, SHA-256 (hex) and size in bytes."""

    object: str
    digest: str
    size: int


class MediaSlot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The placeholder of media items of one kind (image, video, audio) in a prompt.

    `text` is the placeholder as templates write it; the tokenizer turns it into the one id `token`.  An item takes `tokens` of
    these ids in the prompt, or the sequence `ids` if the engine puts other ids between or around them; `tokens` 0 = only the
    engine knows the number, and block hashes end where the first such item begins.
    """

    text: str
    token: int
    tokens: int = 0
    ids: list[int] = []


class ModelCard(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A served model. `files` has "tokenizer.json" and, if the model has one, "chat_template.jinja"."""

    model: str  # the name that clients use
    pool: str
    namespace: str = "default"
    kinds: list[str] = msgspec.field(default_factory=lambda: ["chat", "completion"])  # also: embedding, score, classify
    labels: list[str] = []  # names of the classes of `classify`, by index
    context_length: int
    block_size: int  # of the pool; a worker with another one is refused
    vocab_size: int = 0
    eos_token_ids: list[int] = []
    bos_token: str | None = None  # passed to the chat template
    eos_token: str | None = None
    files: dict[str, CardFile] = {}
    template_kwargs: dict[str, Any] = {}
    default_sampling: dict[str, Any] = {}  # the model's own generation defaults, for requests that leave them out
    default_max_tokens: int | None = None  # None = up to the context length
    tool_parser: str | None = None  # parses tool calls out of answers, in the worker; None = there is none
    reasoning_parser: str | None = None
    prompt_embeds: bool = False  # the model accepts prompts as embeddings
    media: dict[str, MediaSlot] = {}  # kinds of media that the model accepts in messages
    aliases: list[str] = []
    adapters: list[str] = []  # adapters that its workers have or had: known until they are unloaded everywhere
    owner: str = "headrace"
    created: float = 0.0
