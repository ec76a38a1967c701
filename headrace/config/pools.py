"""Derives the settings of the further pools of one `headrace up` (`up.pools`), each with a model and an engine of its own.

    [up.pools.small-sglang]       # the name that clients use
    engine = "sglang"
    workers = 2
    engine_args = {dtype = "float32"}

    [up.pools.dear]               # a further fleet of another pool: with the name that clients use for that one
    served_name = "small"
    fleet = "dear"
    price = 4

A pool has the settings of `worker`, and `mode` and the numbers of workers of `up`. What it does not give is as for the first
pool, which is the one that `worker` and `up` describe; names, engine settings and numbers of workers are each pool's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.base.errors import SettingsError
from headrace.config.options import find, section_options
from headrace.config.values import close_matches

POOLS = "up.pools"
POOL = "worker.pool"

OF_UP = frozenset({"mode", "workers", "prefill_workers", "decode_workers", "encode_workers"})
"""Settings of `up` that a pool may give."""
NOT_SHARED = frozenset(
    {*(f"up.{name}" for name in OF_UP), "worker.served_name", "worker.aliases", "worker.engine_args", "worker.tool_parser"}
    | {"worker.reasoning_parser", "worker.fleet", "worker.price", "worker.pool_block"}
)
"""Settings that a pool does not have from the first one: engines have parsers and settings under names of their own."""
_FIXED = frozenset({"name", "role", "pool", "metrics_port"})  # of a pool by its name, of a worker by `up`


def values_of_pool(pools: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    """Return key → value as given, of the settings of one pool, its name among them.

    Raises SettingsError for a pool that is not there, that is no table, or that has something else than settings of a pool.
    """
    if name not in pools:
        raise SettingsError(f"{POOL} = {name!r}: {POOLS} has no such pool{close_matches(name, pools)}")
    given = pools[name]
    if not name or not isinstance(given, dict):
        raise SettingsError(
            f'{POOLS} ({source}): a pool is a name and a table of settings, as small={{"engine": "sim"}}, not {name}={given!r}'
        )
    values = {"worker.served_name": name}
    for field, value in given.items():
        key = f"up.{field}" if field in OF_UP else f"worker.{field}"
        if field in _FIXED or find(key) is None:
            known = {option.key.removeprefix("worker.") for option in section_options("worker")} - _FIXED | OF_UP
            raise SettingsError(f"{POOLS}.{name} ({source}): {field!r} is no setting of a pool{close_matches(field, known)}")
        values[key] = value
    if "served_name" in given and not given.get("fleet"):
        raise SettingsError(f"{POOLS}.{name} ({source}): a pool with a served_name is a fleet of that model: give it a fleet")
    return values
