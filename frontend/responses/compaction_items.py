"""Packs summaries into items of type `compaction`, which clients send back like any other item, and reads them.

The `encrypted_content` of such an item is opaque to clients and not encrypted: it is made of the client's own conversation, and
nothing of it is kept here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from headrace.frontend.errors import BadRequest
from headrace.frontend.http.field_checks import unsupported

MARK = "hrc1."  # begins what this server made; the number is the version of what follows


def packed(summary: str) -> str:
    """Return the opaque content of a compaction item."""
    return MARK + base64.urlsafe_b64encode(summary.encode()).decode()


def summary_in(item: Mapping[str, Any], where: str) -> str:
    """Return the summary in a compaction item. Raises BadRequest if this server did not make it."""
    param = f"{where}.encrypted_content"
    content = item.get("encrypted_content")
    if isinstance(content, str) and content.startswith(MARK):
        try:
            return base64.b64decode(content.removeprefix(MARK), altchars=b"-_", validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise BadRequest(f"invalid value for {param}: it was changed or cut since it was made", param=param) from None
    raise unsupported(param, "was made by another server and cannot be read here")
