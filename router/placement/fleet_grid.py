"""Reads the JSON configuration of Dynamo's global router, and chooses fleets by its grids.

The names of its pools (`*_pool_dynamo_namespaces`) are names of fleets.  In mode `agg` a grid over the targets, or over prompt
length and both, names the fleet of a request.  In mode `disagg` one grid names the fleet whose prefill workers compute the
prompt, and one the fleet that answers.  A cell is found by (value - least) / step, clamped to the grid; a target that is not
given is the middle of its range.  The first priority override whose range has the request's priority wins over the cell.

What the grid names is preferred and no filter: a fleet without workers does not fail a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.router.errors import SettingsInvalid, need

_MODES = ("disagg", "agg")


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    least: float
    most: float
    cells: int

    def cell(self, value: float | None) -> int:
        """Return the part that a value lies in; that of the middle of the axis for None."""
        at = (self.least + self.most) / 2 if value is None else value
        place = (at - self.least) / ((self.most - self.least) / self.cells)
        return int(max(0.0, min(place, self.cells - 1.0)))  # clamped first: a huge value is no index


@dataclass(frozen=True, slots=True)
class PriorityOverride:
    """Requests with a priority in this range, ends included, go to one pool."""

    least: int
    most: int
    pool: int


@dataclass(frozen=True, slots=True)
class PoolGrid:
    """A strategy: axes, a mapping of their cells to pools, and overrides. `speeds`: lower is faster."""

    pools: tuple[str, ...]
    speeds: tuple[int, ...]
    axes: tuple[Axis, ...]
    mapping: Any  # nested lists of pool numbers, a level per axis
    overrides: tuple[PriorityOverride, ...]

    def override(self, priority: int | None) -> int | None:
        """Return the pool of the first override that covers this priority; None without one."""
        if priority is None:
            return None
        return next((rule.pool for rule in self.overrides if rule.least <= priority <= rule.most), None)

    def pool(self, values: Mapping[str, float | None], priority: int | None) -> int:
        if (named := self.override(priority)) is not None:
            return named
        cell = self.mapping
        for axis in self.axes:
            cell = cell[axis.cell(values[axis.name])]
        return int(cell)

    def order(self, pool: int) -> tuple[str, ...]:
        """Return the pool's name, then those of faster ones from slowest to fastest, then the others, the fastest first."""
        own = self.speeds[pool]
        others = [n for n in range(len(self.pools)) if n != pool]
        faster = sorted((n for n in others if self.speeds[n] < own), key=lambda n: -self.speeds[n])
        slower = sorted((n for n in others if self.speeds[n] >= own), key=lambda n: self.speeds[n])
        return tuple(dict.fromkeys(self.pools[n] for n in (pool, *faster, *slower)))


@dataclass(frozen=True, slots=True)
class FleetGrid:
    answers: PoolGrid
    prefill: PoolGrid | None
    retries: bool  # a request that fails before its first output goes to the next faster fleet

    def order(self, *, tokens: int, ttft_s: float | None, itl_s: float | None, priority: int | None) -> tuple[str, ...]:
        values = _values(tokens, ttft_s, itl_s)
        return self.answers.order(self.answers.pool(values, priority))

    def prefill_fleet(self, *, tokens: int, ttft_s: float | None, itl_s: float | None, priority: int | None) -> str:
        """Return the fleet whose prefill workers compute the prompt; empty: the grid does not say."""
        if self.prefill is None:
            return ""
        return self.prefill.pools[self.prefill.pool(_values(tokens, ttft_s, itl_s), priority)]

    def reason(self, priority: int | None, *, retried: bool) -> str:
        if retried and self.retries:
            return "retry"
        return "override" if self.answers.override(priority) is not None else "grid"


def _values(tokens: int, ttft_s: float | None, itl_s: float | None) -> dict[str, float | None]:
    return {
        "isl": tokens,
        "context_length": tokens,
        "ttft": None if ttft_s is None else ttft_s * 1000.0,
        "itl": None if itl_s is None else itl_s * 1000.0,
    }


def read_grid(path: str) -> FleetGrid:
    """Read a configuration file. Raises SettingsInvalid, which names the file, the key and the value."""
    try:
        data = msgspec.json.decode(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise SettingsInvalid(f"the grid {path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise SettingsInvalid(f"the grid {path} is no JSON: {error}") from None
    try:
        return parse_grid(data)
    except SettingsInvalid as error:
        raise SettingsInvalid(f"the grid {path}: {error}") from None


def parse_grid(data: Any) -> FleetGrid:
    """Check a configuration. Raises SettingsInvalid, which names the key and the value."""
    need(isinstance(data, dict), "the configuration", data, "an object")
    mode = data.get("mode", "disagg")
    need(mode in _MODES, "mode", mode, " or ".join(_MODES))
    retries = data.get("enable_priority_retry", False)
    need(isinstance(retries, bool), "enable_priority_retry", retries, "true or false")
    if mode == "agg":
        strategy = _table(data, "agg_pool_selection_strategy")
        axes = (
            ("isl", "ttft", "itl")
            if any(f"isl_{part}" in strategy for part in ("min", "max", "resolution"))
            else ("ttft", "itl")
        )
        return FleetGrid(_grid(data, "agg", axes), None, retries)
    return FleetGrid(_grid(data, "decode", ("context_length", "itl")), _grid(data, "prefill", ("isl", "ttft")), retries)


def _grid(data: Mapping[str, Any], kind: str, axes: Sequence[str]) -> PoolGrid:
    names = data.get(f"{kind}_pool_dynamo_namespaces")
    listed = isinstance(names, list) and bool(names) and all(isinstance(name, str) and name for name in names)
    need(listed, f"{kind}_pool_dynamo_namespaces", names, "a list of names")
    pools = tuple(names or ())
    count = data.get(f"num_{kind}_pools")
    need(
        _whole(count) and count == len(pools), f"num_{kind}_pools", count, f"{len(pools)}, as {kind}_pool_dynamo_namespaces has"
    )
    key = f"{kind}_pool_selection_strategy"
    strategy = _table(data, key)
    found = tuple(_axis(strategy, axis, key) for axis in axes)
    mapping = strategy.get(f"{kind}_pool_mapping")
    _check_mapping(mapping, found, len(pools), f"{key}.{kind}_pool_mapping")
    return PoolGrid(pools, _speeds(data, kind, len(pools)), found, mapping, _overrides(strategy, key, len(pools)))


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key)
    need(isinstance(found, dict), key, found, "an object")
    return found or {}


def _speeds(data: Mapping[str, Any], kind: str, pools: int) -> tuple[int, ...]:
    key = f"{kind}_pool_priorities"
    given = data.get(key)
    if given is None:
        return tuple(range(pools))
    need(isinstance(given, list) and len(given) == pools, key, given, f"a list of {pools} whole numbers")
    for at, value in enumerate(given):
        need(_whole(value), f"{key}[{at}]", value, "a whole number")
    return tuple(given)


def _axis(strategy: Mapping[str, Any], axis: str, where: str) -> Axis:
    timed = axis in ("ttft", "itl")

    def number(part: str) -> float:
        name = f"{axis}_{part}_ms" if timed else f"{axis}_{part}"
        value = strategy.get(name, strategy.get(f"{axis}_{part}"))
        need(
            isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12,
            f"{where}.{name}",
            value,
            "a number",
        )
        return float(value or 0.0)

    least, most = number("min"), number("max")
    name = f"{axis}_min_ms" if timed else f"{axis}_min"
    need(least < most, f"{where}.{name}", least, f"below the most, {most:g}")
    cells = strategy.get(f"{axis}_resolution")
    need(_whole(cells) and 1 <= (cells or 0) <= 1000, f"{where}.{axis}_resolution", cells, "a whole number from 1 to 1000")
    return Axis(axis, least, most, int(cells or 1))


def _check_mapping(mapping: Any, axes: Sequence[Axis], pools: int, where: str) -> None:
    if not axes:
        need(_whole(mapping) and 0 <= mapping < pools, where, mapping, f"the number of a pool, 0 to {pools - 1}")
        return
    first, *rest = axes
    fits = isinstance(mapping, list) and len(mapping) == first.cells
    need(fits, where, mapping, f"a list of {first.cells}, as {first.name}_resolution says")
    for at, inner in enumerate(mapping):
        _check_mapping(inner, rest, pools, f"{where}[{at}]")


def _overrides(strategy: Mapping[str, Any], where: str, pools: int) -> tuple[PriorityOverride, ...]:
    rules = strategy.get("priority_overrides", [])
    need(isinstance(rules, list), f"{where}.priority_overrides", rules, "a list")
    found = []
    for at, rule in enumerate(rules):
        name = f"{where}.priority_overrides[{at}]"
        keys = {"min_priority", "max_priority", "target_pool"}
        need(isinstance(rule, dict) and rule.keys() == keys, name, rule, f"an object with {', '.join(sorted(keys))}")
        for key in keys:
            need(_whole(rule[key]), f"{name}.{key}", rule[key], "a whole number")
        least, most, pool = rule["min_priority"], rule["max_priority"], rule["target_pool"]
        need(least <= most, f"{name}.min_priority", least, f"at most max_priority, {most}")
        need(0 <= pool < pools, f"{name}.target_pool", pool, f"the number of a pool, 0 to {pools - 1}")
        found.append(PriorityOverride(least, most, pool))
    return tuple(found)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
