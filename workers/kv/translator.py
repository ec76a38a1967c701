"""Translates an engine's block hashes to chain values and keeps the inventory of cached blocks. Sans-io.

An engine names blocks by hashes of its own and gives their content only in `stored`; `removed` has only the hash. So every hash
that the engine holds has an entry here, and a removed hash is remembered for a while, because the next block of its sequence
may still name it as its parent.

A chain value counts as held in a tier while a hash with that value is complete there: in every KV group of the model (full
attention, sliding window, …) that has ever stored a block in that tier. Several hashes may have the same value, and the device
may hold the same hash in several copies: both are counted.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from headrace.broker.blocks import chain_seed, extend_chain_packed
from headrace.broker.codec import pack_u32
from headrace.workers.engine import TIERS, KvBatch, KvEvent, Tier

Values = tuple[int, ...]
"""The chain values of an engine block: one, or several if the engine's blocks are longer than the pool's."""

_GHOSTS = 4096  # least number of removed hashes that are remembered


@dataclass(slots=True)
class CacheChange:
    """The net effect of an engine step in chain values per tier: `cleared` applies first, then `removed`, then `stored`."""

    cleared: bool = False
    removed: dict[Tier, list[int]] = field(default_factory=dict)
    stored: dict[Tier, list[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed) or bool(self.stored)


@dataclass(slots=True)
class Anomalies:
    """Counts of unusable events and blocks since the translator was created."""

    unplaced: int = 0  # blocks without a known content
    orphans: int = 0  # events with an unknown parent, although all cached blocks should be known
    unknown_removed: int = 0  # removals of blocks that were not held
    odd_sizes: int = 0  # events whose blocks cannot be cut into the pool's


class _TierState:
    __slots__ = ("groups", "hashes", "held", "touched")

    def __init__(self) -> None:
        self.groups: dict[int, dict[int, int]] = {}  # per group: hash → copies
        self.hashes: list[dict[int, int]] = []  # the same, of all groups
        self.held: dict[int, int] = {}  # chain value → complete hashes that have it
        self.touched: dict[int, bool] = {}  # in this step: chain value → was it held before

    def complete(self, hash_: int) -> bool:
        for copies in self.hashes:  # noqa: SIM110  # `all` of a generator takes twice as long
            if hash_ not in copies:
                return False
        return True

    def before(self) -> Collection[int]:
        """Return the chain values that were held when this step began."""
        if not self.touched:
            return self.held
        held = set(self.held)
        held.update(value for value, was in self.touched.items() if was)
        held.difference_update(value for value, was in self.touched.items() if not was)
        return held

    def hold(self, values: Values) -> None:
        held, touched = self.held, self.touched
        for value in values:
            if value in held:
                held[value] += 1
                continue
            held[value] = 1
            if value not in touched:
                touched[value] = False

    def unhold(self, values: Values) -> None:
        held, touched = self.held, self.touched
        for value in values:
            if held[value] > 1:
                held[value] -= 1
                continue
            del held[value]
            if value not in touched:
                touched[value] = True


@dataclass(slots=True)
class _Orphan:
    """A stored event whose parent is not known yet."""

    event: KvEvent
    span: int


class Translator:
    """Translates the cache events of an engine. Apply every batch, in order."""

    def __init__(self, block_size: int, *, blocks: int = 0) -> None:
        """`block_size`: the pool's, in tokens. `blocks`: the engine's number of blocks, the most removed hashes remembered."""
        self.block_size = block_size
        self.anomalies = Anomalies()
        self.odd_size = 0  # the last refused size of a block, in tokens
        self.lost = False  # An event is missing: the engine's cache has to be read anew.
        self._most_ghosts = max(_GHOSTS, blocks)
        self._tiers: dict[Tier, _TierState] = {tier: _TierState() for tier in TIERS}
        self._used: list[_TierState] = []  # tiers that have groups
        self._places: defaultdict[int, int] = defaultdict(int)  # hash → groups, of all tiers, that hold it
        self._values: dict[int, Values] = {}  # chain values of the hashes held in some tier
        self._ghosts: OrderedDict[int, Values] = OrderedDict()  # chain values of removed hashes
        self._orphans: list[_Orphan] = []
        self._partial = False

    # -- inventory ---------------------------------------------------------------------------------------------------------

    def inventory(self) -> dict[Tier, Collection[int]]:
        """Return the chain values in each tier, which later steps change."""
        return {tier: state.held for tier, state in self._tiers.items()}

    @property
    def device(self) -> Mapping[int, int]:
        """Return the chain values on the device, as keys."""
        return self._tiers["device"].held

    def counts(self) -> dict[Tier, int]:
        """Return the number of blocks held per tier."""
        return {tier: len(state.held) for tier, state in self._tiers.items()}

    def held(self) -> list[int]:
        """Return the number of blocks held per tier, in the order of `TIERS`."""
        return [len(state.held) for state in self._tiers.values()]

    @property
    def remembered(self) -> int:
        """Return the number of known hashes, held or removed."""
        return len(self._values) + len(self._ghosts)

    # -- one step ----------------------------------------------------------------------------------------------------------

    def apply(self, batch: KvBatch) -> CacheChange:
        before: dict[Tier, Collection[int]] | None = None
        if batch and batch[0].kind == "cleared":
            self._partial = batch.partial
            self.lost = False
        for event in batch:
            if event.kind == "cleared":
                if before is None:
                    before = {tier: state.before() for tier, state in self._tiers.items()}
                self._clear()
            elif event.kind == "removed":
                self._remove(event)
            else:
                self._store(event)
        if self._orphans:
            self._place_orphans()
        return self._change() if before is None else self._difference(before)

    def _change(self) -> CacheChange:
        change = CacheChange()
        for tier, state in self._tiers.items():
            if not state.touched:
                continue
            held = state.held
            stored = [value for value, was in state.touched.items() if not was and value in held]
            removed = [value for value, was in state.touched.items() if was and value not in held]
            if stored:
                change.stored[tier] = stored
            if removed:
                change.removed[tier] = removed
            state.touched = {}
        return change

    def _difference(self, before: Mapping[Tier, Collection[int]]) -> CacheChange:
        """Return the change after a `cleared`: the real differences, or the whole inventory if that is shorter."""
        change = CacheChange()
        size = 0
        for tier, state in self._tiers.items():
            state.touched = {}
            was, now = before[tier], state.held
            if stored := [value for value in now if value not in was]:
                change.stored[tier] = stored
            if removed := [value for value in was if value not in now]:
                change.removed[tier] = removed
            size += len(stored) + len(removed)
        if size > sum(len(state.held) for state in self._tiers.values()):
            all_ = {tier: list(state.held) for tier, state in self._tiers.items() if state.held}
            return CacheChange(cleared=True, stored=all_)
        return change

    # -- events ------------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        for hash_ in list(self._values):
            self._forget(hash_)
        for state in self._tiers.values():
            for copies in state.hashes:  # The set of groups stays known.
                copies.clear()
            state.held = {}
            state.touched = {}
        self._places.clear()
        self._orphans.clear()

    def _forget(self, hash_: int) -> None:
        """Move a hash that no tier holds any more to the remembered ones."""
        values = self._values.pop(hash_, None)
        if values is None:
            return
        self._ghosts[hash_] = values
        if len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)

    def _remove(self, event: KvEvent) -> None:
        state = self._tiers[event.tier]
        copies = state.groups.get(event.group or 0)
        for hash_ in event.hashes:
            count = copies.get(hash_, 0) if copies is not None else 0
            if copies is None or not count:
                self.anomalies.unknown_removed += 1
            elif count > 1:
                copies[hash_] = count - 1
            else:
                if hash_ in self._values and state.complete(hash_):
                    state.unhold(self._values[hash_])
                del copies[hash_]
                places = self._places.pop(hash_) - 1
                if places:
                    self._places[hash_] = places
                else:
                    self._forget(hash_)

    def _store(self, event: KvEvent) -> None:
        hashes = event.hashes
        if not hashes:
            return
        blocks, tokens = len(hashes), len(event.token_ids)
        span = event.block_size or tokens // blocks
        # A media item has an offset in its block but no end, so a longer block with media cannot be cut into parts.
        uneven = span < self.block_size or span % self.block_size or (event.media and span != self.block_size)
        if tokens and uneven:
            self.anomalies.odd_sizes += 1
            self.odd_size = span
            return
        self._enter(event)
        if self._values.keys() >= set(hashes):
            return
        if not tokens or span * blocks != tokens:
            return  # Another group's event, or that of another tier, gives the content of these blocks.
        if not self._place(event, span):
            self._orphans.append(_Orphan(event, span))

    def _enter(self, event: KvEvent) -> None:
        """Count the hashes of an event as held. Their content may not be known yet."""
        state = self._tiers[event.tier]
        group = event.group or 0
        copies = state.groups.get(group)
        if copies is None:
            if not state.groups:
                self._used.append(state)
            copies = state.groups[group] = {}
            state.hashes.append(copies)
            for value in state.held:  # No hash is in all groups any more.
                state.touched.setdefault(value, True)
            state.held.clear()
        counted = event.tier == "device"
        for hash_ in event.hashes:
            if hash_ in copies:
                if counted:  # A lower tier reports the hash again after a copy between tiers; it holds it once.
                    copies[hash_] += 1
                continue
            copies[hash_] = 1
            self._places[hash_] += 1
            if hash_ in self._values:
                if state.complete(hash_):
                    state.hold(self._values[hash_])
            elif hash_ in self._ghosts:
                self._name(hash_, self._ghosts.pop(hash_))

    def _place(self, event: KvEvent, span: int) -> bool:
        """Give the blocks of an event, `span` tokens each, their chain values. Returns False if its parent is unknown."""
        if event.parent is None:
            value = chain_seed(event.adapter, event.salt)
        else:
            known = self._values.get(event.parent) or self._ghosts.get(event.parent)
            if known is None:
                return False
            value = known[-1]
        packed = pack_u32(event.token_ids)
        media, width = event.media, self.block_size * 4
        each = span // self.block_size
        at = 0
        known_values = self._values
        for number, hash_ in enumerate(event.hashes):
            value = extend_chain_packed(value, packed[at : at + width], media[number] if media else ())
            at += width
            values: Values = (value,)
            for _ in range(each - 1):
                value = extend_chain_packed(value, packed[at : at + width])
                at += width
                values += (value,)
            if hash_ not in known_values:
                self._name(hash_, values)
        return True

    def _name(self, hash_: int, values: Values) -> None:
        """Set the chain values of a hash, and count them as held in every tier where the hash is complete."""
        if hash_ not in self._places:
            self._ghosts[hash_] = values
            return
        self._values[hash_] = values
        for state in self._used:
            if state.complete(hash_):
                state.hold(values)

    def _place_orphans(self) -> None:
        """Place the orphans of a step at its end, as parents may follow their children: an inventory has no order."""
        waiting, progress = self._orphans, True
        while waiting and progress:
            left = [orphan for orphan in waiting if not self._place(orphan.event, orphan.span)]
            progress = len(left) < len(waiting)
            waiting = left
        self._orphans = []
        for orphan in waiting:
            self.anomalies.unplaced += len(orphan.event.hashes)
            if not self._partial and not self._is_held(orphan.event.parent):
                self.anomalies.orphans += 1
                self.lost = True

    def _is_held(self, hash_: int | None) -> bool:
        return hash_ in self._places
