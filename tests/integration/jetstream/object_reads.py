"""What tests of object stores share: the chunks that are stored, and a range that is read."""

from typing import Any

from headrace.jetstream.client import Connection
from headrace.jetstream.objects import ObjectStore
from headrace.jetstream.subjects import Subjects


def chunk_counts(connection: Connection, subjects: Subjects) -> Any:
    bucket = subjects.bucket("files")
    return connection.subject_counts(f"OBJ_{bucket}", f"$O.{bucket}.C.>")


async def range_of(files: ObjectStore, name: str, offset: int, length: int | None = None) -> bytes:
    return b"".join([piece async for piece in files.chunks(name, offset=offset, length=length)])
