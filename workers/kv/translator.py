"""From an engine's block hashes to chain values, and the inventory of what the engine has cached.

Sans-io.  An engine names blocks by hashes of its own and says only in `stored` what they hold; `removed` names nothing but the
hash.  So every hash that the engine holds somewhere has an entry here, and a hash that has just gone is remembered for a while:
the next block of its sequence may still name it as its parent.

A chain value counts as held in a tier while some hash with that value is complete there: in every KV group of the model (full
attention, sliding window, …) that has ever stored a block in that tier.  Several hashes may have the same value, and on the
device the same hash may be there in several copies: both are counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from headrace.broker.blocks import chain_seed, extend_chain_packed
from headrace.broker.codec import pack_u32
from headrace.workers.engine import TIERS, KvBatch, KvEvent, Tier

Values = tuple[int, ...]
"""The chain values of one engine block: one, or several where the engine's blocks are longer than the pool's."""

_GHOSTS = 4096  # least number of hashes remembered after they have gone


@dataclass(slots=True)
class Change:
    """The net effect of one engine step: first `cleared`, then `removed`, then `stored` apply. Chain values per tier."""

    cleared: bool = False
    removed: dict[Tier, list[int]] = field(default_factory=dict)
    stored: dict[Tier, list[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed) or bool(self.stored)


@dataclass(slots=True)
class Oddities:
    """What came that cannot be used, since the translator was made: counts."""

    unplaced: int = 0  # blocks of which nobody said what they hold
    orphans: int = 0  # events whose parent is not known, although everything that is cached should be
    unknown_removed: int = 0  # removals of blocks that were not there
    odd_sizes: int = 0  # events whose blocks cannot be cut into the pool's


class _TierState:
    """What one tier holds."""

    __slots__ = ("groups", "held", "touched")

    def __init__(self) -> None:
        self.groups: dict[int, dict[int, int]] = {}  # per group: hash → copies
        self.held: dict[int, int] = {}  # chain value → complete hashes that have it
        self.touched: dict[int, bool] = {}  # in this step: chain value → was it held before

    def complete(self, hash_: int) -> bool:
        """Whether every group has it. Not asked of a tier without groups."""
        for copies in self.groups.values():  # noqa: SIM110  # `all` of a generator takes twice as long
            if hash_ not in copies:
                return False
        return True

    def before(self) -> Collection[int]:
        """What was held when this step began."""
        if not self.touched:
            return self.held
        held = set(self.held)
        held.update(value for value, was in self.touched.items() if was)
        held.difference_update(value for value, was in self.touched.items() if not was)
        return held

    def hold(self, values: Values) -> None:
        held = self.held
        for value in values:
            count = held.get(value, 0)
            if not count:
                self.touched.setdefault(value, False)
            held[value] = count + 1

    def unhold(self, values: Values) -> None:
        held = self.held
        for value in values:
            count = held[value] - 1
            if count:
                held[value] = count
            else:
                self.touched.setdefault(value, True)
                del held[value]


@dataclass(slots=True)
class _Orphan:
    """A stored event whose parent is not known (yet)."""

    event: KvEvent
    span: int


class Translator:
    """One engine's cache. Feed it every batch, in order."""

    def __init__(self, block_size: int, *, blocks: int = 0) -> None:
        """`block_size`: the pool's, in tokens. `blocks`: the engine's number of blocks, which bounds what is remembered."""
        self.block_size = block_size
        self.odd = Oddities()
        self.odd_size = 0  # the last refused size of a block, in tokens
        self.lost = False  # something is missing: read the engine's cache anew
        self._most_ghosts = max(_GHOSTS, blocks)
        self._tiers: dict[Tier, _TierState] = {tier: _TierState() for tier in TIERS}
        self._used: list[_TierState] = []  # those that have groups
        self._places: dict[int, int] = {}  # hash → groups, of all tiers, that hold it
        self._values: dict[int, Values] = {}  # of hashes that are in some tier
        self._ghosts: OrderedDict[int, Values] = OrderedDict()  # of hashes that were
        self._orphans: list[_Orphan] = []
        self._partial = False

    # -- what is there -----------------------------------------------------------------------------------------------------

    def inventory(self) -> dict[Tier, Collection[int]]:
        """The chain values in each tier. Views: copy what is to be kept."""
        return {tier: state.held.keys() for tier, state in self._tiers.items()}

    @property
    def device(self) -> Mapping[int, int]:
        """The chain values on the device, as keys."""
        return self._tiers["device"].held

    def counts(self) -> dict[Tier, int]:
        """Blocks held per tier."""
        return {tier: len(state.held) for tier, state in self._tiers.items()}

    @property
    def remembered(self) -> int:
        """Hashes known, held or gone."""
        return len(self._values) + len(self._ghosts)

    # -- one step ----------------------------------------------------------------------------------------------------------

    def apply(self, batch: KvBatch) -> Change:
        """Take one batch in; the net change it makes."""
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
        self._adopt()
        return self._change() if before is None else self._difference(before)

    def _change(self) -> Change:
        change = Change()
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

    def _difference(self, before: Mapping[Tier, Collection[int]]) -> Change:
        """After a `cleared`: what really differs, or, if that is shorter, all that is there now."""
        change = Change()
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
            return Change(cleared=True, stored=all_)
        return change

    # -- events ------------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        for hash_ in list(self._values):
            self._forget(hash_)
        for state in self._tiers.values():
            for copies in state.groups.values():  # which groups there are stays known
                copies.clear()
            state.held = {}
            state.touched = {}
        self._places.clear()
        self._orphans.clear()

    def _forget(self, hash_: int) -> None:
        """This hash is in no tier any more."""
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
                self.odd.unknown_removed += 1
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
        span = event.block_size or len(event.token_ids) // len(hashes)
        # An item says where it begins in its block, not where it ends: a longer block cannot be cut into parts.
        uneven = span < self.block_size or span % self.block_size or (event.media and span != self.block_size)
        if event.token_ids and uneven:
            self.odd.odd_sizes += 1
            self.odd_size = span
            return
        self._enter(event)
        if self._values.keys() >= set(hashes):
            return
        if span * len(hashes) != len(event.token_ids):
            return  # another group's event says what these are
        if not self._place(event, span):
            self._orphans.append(_Orphan(event, span))

    def _enter(self, event: KvEvent) -> None:
        """Count these hashes in; what they hold may not be known yet."""
        state = self._tiers[event.tier]
        group = event.group or 0
        copies = state.groups.get(group)
        if copies is None:
            if not state.groups:
                self._used.append(state)
            copies = state.groups[group] = {}
            for value in state.held:  # nothing is in all groups any more
                state.touched.setdefault(value, True)
            state.held.clear()
        counted = event.tier == "device"
        for hash_ in event.hashes:
            count = copies.get(hash_, 0)
            if count and not counted:
                continue  # a lower tier says it again after a copy from above or below; it is there once
            copies[hash_] = count + 1
            if count:
                continue
            self._places[hash_] = self._places.get(hash_, 0) + 1
            values = self._values.get(hash_)
            if values is None:
                values = self._ghosts.pop(hash_, None)
                if values is None:
                    continue
                self._name(hash_, values)
            elif state.complete(hash_):
                state.hold(values)

    def _place(self, event: KvEvent, span: int) -> bool:
        """Give the blocks of an event, of `span` tokens each, their chain values, if its parent has one."""
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
        """From now on these are the values of this hash, wherever it is (still) held."""
        if hash_ not in self._places:
            self._ghosts[hash_] = values
            return
        self._values[hash_] = values
        for state in self._used:
            if state.complete(hash_):
                state.hold(values)

    def _adopt(self) -> None:
        """At the end of a step: parents may have come after their children (an inventory has no order)."""
        waiting, progress = self._orphans, True
        while waiting and progress:
            left = [orphan for orphan in waiting if not self._place(orphan.event, orphan.span)]
            progress = len(left) < len(waiting)
            waiting = left
        self._orphans = []
        for orphan in waiting:
            self.odd.unplaced += len(orphan.event.hashes)
            if not self._partial and not self._present(orphan.event.parent):
                self.odd.orphans += 1
                self.lost = True

    def _present(self, hash_: int | None) -> bool:
        """Whether this hash is held, with or without a known value."""
        return hash_ in self._places
