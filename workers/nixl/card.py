"""The card by which an agent introduces itself to its peers. It travels as bytes over NATS."""

from __future__ import annotations

import msgspec
import xxhash

from headrace.workers.nixl.errors import BadCard

VERSION = 1


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """An agent and its arena. `digest` guards `metadata`: it goes to a parser in C++ that we did not write."""

    v: int = VERSION
    agent: str
    metadata: bytes
    digest: int
    address: int
    blocks: int
    block_bytes: int


def pack(*, agent: str, metadata: bytes, address: int, blocks: int, block_bytes: int) -> bytes:
    """Make the card of an agent with this arena."""
    digest = xxhash.xxh3_64_intdigest(metadata)
    card = Card(agent=agent, metadata=metadata, digest=digest, address=address, blocks=blocks, block_bytes=block_bytes)
    return msgspec.msgpack.encode(card)


def unpack(data: bytes) -> Card:
    """Read a card. Raises BadCard."""
    try:
        card = msgspec.msgpack.decode(data, type=Card)
    except msgspec.DecodeError as error:
        raise BadCard(f"a peer's card of {len(data)} bytes does not decode: {error}") from None
    if card.v != VERSION:
        raise BadCard(f"the card of {card.agent} has version {card.v}, we speak {VERSION}")
    if xxhash.xxh3_64_intdigest(card.metadata) != card.digest:
        raise BadCard(f"the card of {card.agent} is damaged: its metadata does not match its digest")
    if card.blocks < 1 or card.block_bytes < 1 or card.address < 1:
        raise BadCard(f"the card of {card.agent} describes no memory: {card.blocks} blocks of {card.block_bytes} bytes")
    return card
