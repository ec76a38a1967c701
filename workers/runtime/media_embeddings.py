"""Adds embeddings of media that other workers have computed to a sequence, before the engine gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.broker.messages import Spill
from headrace.workers.engine import Sequence


@dataclass(frozen=True, slots=True)
class MediaOrigin:
    """The request that media belong to, and the place of its payload if that is in the store of large payloads."""

    request_id: str
    spill: Spill | None = None


class Embeddings(Protocol):
    """Gets embeddings of media from elsewhere (`headrace.workers.encoding.source.EmbeddingSource`)."""

    async def fetch(self, sequence: Sequence, origin: MediaOrigin) -> Mapping[int, bytes]:
        """Return the available embeddings by the index of the item.

        Those of items in the part of the prompt that should be cached are not fetched.
        """


async def with_embeddings(embeddings: Embeddings | None, sequence: Sequence, origin: MediaOrigin) -> Sequence:
    """Return the sequence with the embeddings of its media that could be had; the engine encodes the others.

    The decode side of a hand-over fetches the blocks of its prompt and needs none.
    """
    fetches_blocks = sequence.handover is not None and sequence.handover.kind == "decode"
    if embeddings is None or not sequence.media or fetches_blocks:
        return sequence
    found = await embeddings.fetch(sequence, origin)
    return msgspec.structs.replace(sequence, embeddings=found) if found else sequence
