"""Choice of the index: the compiled one where it was built, else the pure one; the log says which."""

from __future__ import annotations

import os
from typing import Literal, get_args

import structlog

from headrace.router.errors import SettingsInvalid
from headrace.router.index.interface import BlockTable, OnEvict
from headrace.router.index.prefix import PurePrefixIndex

Implementation = Literal["auto", "compiled", "pure"]
IMPLEMENTATION_VARIABLE = "HEADRACE_INDEX"  # overrides what the caller asks for

_log = structlog.get_logger(__name__)


def create_index(
    implementation: Implementation = "auto", *, max_entries: int = 0, on_evict: OnEvict | None = None
) -> BlockTable:
    """Make an empty index of at most `max_entries` entries (block, worker, tier); 0 = no limit.

    `auto` takes the compiled one if it can be loaded. Raises SettingsInvalid for `compiled` where it was not built, for
    another name and for a negative limit.
    """
    wanted = os.environ.get(IMPLEMENTATION_VARIABLE) or implementation
    if wanted not in get_args(Implementation):
        raise SettingsInvalid(f"index implementation {wanted!r} is none of {', '.join(get_args(Implementation))}")
    if max_entries < 0:
        raise SettingsInvalid(f"an index cannot hold {max_entries} entries")
    index: BlockTable | None = None
    if wanted != "pure":
        try:
            from headrace.router.index._table import CompiledPrefixIndex
        except (ImportError, ValueError) as error:  # ValueError: its parts were not built together
            if wanted == "compiled":
                raise SettingsInvalid(f"the compiled index was not built: {error}") from error
            _log.warning("index.not_compiled", reason=str(error))
        else:
            index = CompiledPrefixIndex(max_entries=max_entries, on_evict=on_evict)
    if index is None:  # an empty one is false
        index = PurePrefixIndex(max_entries=max_entries, on_evict=on_evict)
    _log.info("index.created", implementation=index.implementation, max_entries=max_entries)
    return index
