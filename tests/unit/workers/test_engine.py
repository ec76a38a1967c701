"""A step is one call of the sink, with one output of a sequence at most, however late the event loop was."""

from __future__ import annotations

import asyncio

from headrace.workers.engine import EngineSteps, Output


def ids(calls: list[list[Output]]) -> list[list[tuple[str, int]]]:
    return [[(output.id, output.ids[0]) for output in call] for call in calls]


async def test_all_outputs_of_a_turn_are_one_call() -> None:
    calls: list[list[Output]] = []
    steps = EngineSteps(calls.append)
    for turn in (1, 2):
        for name in "abc":
            steps.add(Output(name, [turn]))
        await asyncio.sleep(0)
    assert ids(calls) == [[("a", 1), ("b", 1), ("c", 1)], [("a", 2), ("b", 2), ("c", 2)]]


async def test_steps_that_arrive_in_one_turn_are_a_call_each_in_their_order() -> None:
    calls: list[list[Output]] = []
    steps = EngineSteps(calls.append)
    for name, token in (("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 3), ("a", 3), ("c", 1)):
        steps.add(Output(name, [token]))
    await asyncio.sleep(0)
    assert ids(calls) == [[("a", 1), ("b", 1), ("c", 1)], [("a", 2), ("b", 2)], [("b", 3), ("a", 3)]]


async def test_what_a_call_of_the_sink_drops_is_not_in_the_next_one() -> None:
    calls: list[list[Output]] = []

    def sink(outputs: list[Output]) -> None:
        calls.append(outputs)
        steps.drop({"a"})

    steps = EngineSteps(sink)
    for name, token in (("a", 1), ("a", 2), ("b", 1), ("b", 2)):
        steps.add(Output(name, [token]))
    await asyncio.sleep(0)
    assert ids(calls) == [[("a", 1), ("b", 1)], [("b", 2)]]


async def test_an_output_that_a_call_of_the_sink_causes_leaves_later() -> None:
    calls: list[list[Output]] = []

    def sink(outputs: list[Output]) -> None:
        calls.append(outputs)
        if outputs[0].ids == [1]:
            steps.add(Output("a", [9]))

    steps = EngineSteps(sink)
    steps.add(Output("a", [1]))
    steps.add(Output("a", [2]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ids(calls) == [[("a", 1)], [("a", 2)], [("a", 9)]]


async def test_nothing_leaves_after_a_clearing() -> None:
    calls: list[list[Output]] = []
    steps = EngineSteps(calls.append)
    steps.add(Output("a", [1]))
    steps.clear()
    await asyncio.sleep(0)
    steps.add(Output("a", [2]))
    await asyncio.sleep(0)
    assert ids(calls) == [[("a", 2)]]
