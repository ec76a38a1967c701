"""Looking for schedules that break a promise, and showing them.

A `Scenario` says how to build a world and what must hold.  `assert_holds` plays it under many seeds with random
faults, `assert_survives_every_step` puts one fault at every hop of one run.  What fails is made smaller and printed as a
story, with the call that plays it again.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.simulation.virtual.faults import Fault, ProcessFailed
from tests.simulation.virtual.loop import Livelock
from tests.simulation.virtual.network import SimConfig
from tests.simulation.virtual.world import Violation, World

STORY_LINES = 150
ALL_KINDS = ("crash", "crash", "powercut", "freeze", "freeze", "cut", "gap", "outage")


class Checks(Protocol):
    """What a scenario promises."""

    def leftovers(self) -> Sequence[str]:
        """What is not settled yet, in words. Empty: the run may end."""

    def verify(self) -> None:
        """Called once at the end. Raises Violation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A deployment and its promises. `build` installs topology and processes, and must behave the same every time."""

    name: str
    build: Callable[[World], Checks]
    config: SimConfig = field(default_factory=SimConfig)
    faults: int = 4
    kinds: Sequence[str] = ALL_KINDS
    victims: Sequence[str] = ()
    horizon_s: float = 10.0  # faults strike before
    until_s: float = 70.0  # everything must be settled by then


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    scenario: Scenario
    seed: int
    faults: tuple[Fault, ...]
    inject: Mapping[int, str]
    error: Exception | None
    steps: int
    callbacks: int
    story: tuple[str, ...] = ()


def play(
    scenario: Scenario,
    seed: int,
    *,
    faults: Iterable[Fault] | None = None,
    inject: Mapping[int, str] | None = None,
    tracing: bool = False,
) -> Outcome:
    """One run. `faults` None: the random ones of this seed."""
    error: Exception | None = None
    with World(seed, scenario.config, inject=inject, tracing=tracing) as world:
        if faults is None:
            faults = world.random_faults(scenario.faults, scenario.kinds, scenario.victims, horizon_s=scenario.horizon_s)
        planned = tuple(faults)
        world.schedule(planned)
        try:
            checks = scenario.build(world)
            first = scenario.config.quiet_at_s if scenario.config.noise or planned else 0.0
            world.run(first)
            if not world.run(scenario.until_s, stop=lambda: not checks.leftovers()):
                raise Violation(f"never settles: {', '.join(checks.leftovers())}")
            checks.verify()
        except (Violation, ProcessFailed, Livelock) as caught:
            error = caught
            world.log("VIOLATION", caught)
        return Outcome(scenario, seed, planned, dict(inject or {}), error, world.steps, world.callbacks, tuple(world.trace))


def assert_holds(scenario: Scenario, seeds: Iterable[int]) -> int:
    """Play all seeds; raises AssertionError with the story of the first that fails, made small. Returns the hops covered."""
    steps = 0
    for seed in seeds:
        outcome = play(scenario, seed)
        steps += outcome.steps
        if outcome.error is not None:
            raise AssertionError(explain(minimise(outcome)))
    return steps


def assert_survives_every_step(
    scenario: Scenario, *, seed: int = 0, kinds: Iterable[str] = ("crash",), every: int = 1, offset: int = 0
) -> int:
    """Play the run of `seed` without other faults once for each of its hops and kinds, with that fault at that hop.

    `every` and `offset` take a part of the hops. Returns how many runs it was.
    """
    calm = dataclasses.replace(scenario, config=dataclasses.replace(scenario.config, noise=0.0))
    plain = play(calm, seed, faults=())
    if plain.error is not None:
        raise AssertionError(explain(plain))
    runs = 0
    for kind in kinds:
        for step in range(1 + offset, plain.steps + 1, every):
            outcome = play(calm, seed, faults=(), inject={step: kind})
            runs += 1
            if outcome.error is not None:
                raise AssertionError(explain(outcome))
    return runs


def minimise(outcome: Outcome) -> Outcome:
    """Leave out the noise, then fault after fault, as long as the run still fails in the same way.

    Raises ValueError for a run that has not failed.
    """
    if outcome.error is None:
        raise ValueError(f"{outcome.scenario.name}: seed {outcome.seed} breaks no promise")

    def same(other: Outcome) -> bool:
        return _kind(other.error) == _kind(outcome.error)

    best = outcome
    calm = dataclasses.replace(outcome.scenario, config=dataclasses.replace(outcome.scenario.config, noise=0.0))
    trial = play(calm, outcome.seed, faults=best.faults, inject=best.inject)
    if same(trial):
        best = trial
    for fault in outcome.faults:
        fewer = tuple(f for f in best.faults if f is not fault)
        trial = play(best.scenario, best.seed, faults=fewer, inject=best.inject)
        if same(trial):
            best = trial
    return best


def explain(outcome: Outcome) -> str:
    """The failure as a story."""
    told = (
        outcome
        if outcome.story
        else play(outcome.scenario, outcome.seed, faults=outcome.faults, inject=outcome.inject, tracing=True)
    )
    config = outcome.scenario.config
    call = f"play(scenario, {outcome.seed}, faults={list(outcome.faults)!r}, inject={dict(outcome.inject)!r})"
    seed = os.environ.get("PYTHONHASHSEED", "random")
    lines = [
        f"{outcome.scenario.name}: {_ending(outcome)}",
        f"again: {call} with noise={config.noise} and PYTHONHASHSEED={seed}",
        *told.story[-STORY_LINES:],
    ]
    if _kind(told.error) != _kind(outcome.error):
        lines.append(f"(the seed does not reproduce: played again, {_ending(told)})")
    return "\n".join(lines)


def _ending(outcome: Outcome) -> str:
    return "no promise is broken" if outcome.error is None else repr(outcome.error)


def _kind(error: Exception | None) -> str:
    """Runs fail in the same way when type and first two words are the same."""
    return "" if error is None else f"{type(error).__name__} {' '.join(str(error).split(' ')[:2])}"
