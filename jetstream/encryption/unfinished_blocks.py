"""Removes empty files of an encrypted store that nats-server was killed in the midst of making.

nats-server makes the file of a new block of messages first and the block's key after it. Killed between the two it leaves an
empty block without a key, and its next start leaves out the whole stream for that (`corrupt state file`, seen with 2.15.1).
Nothing is in such a block: messages are written once its key is there.
"""

from __future__ import annotations

from pathlib import Path

from headrace.jetstream.encryption.key_files import META_KEY


def remove_unfinished_blocks(store: Path) -> tuple[str, ...]:
    """Remove empty blocks without a key from encrypted streams, and return the names of these streams.

    To be called while no server runs on the store.
    """
    found = []
    for block in sorted(store.glob("jetstream/*/streams/*/msgs/*.blk")):
        stream = block.parent.parent
        try:
            unfinished = not block.stat().st_size and not block.with_suffix(".key").exists() and (stream / META_KEY).exists()
            if unfinished:
                block.unlink()
                found.append(stream.name)
        except OSError:
            continue  # nats-server says itself what it cannot read
    return tuple(dict.fromkeys(found))
