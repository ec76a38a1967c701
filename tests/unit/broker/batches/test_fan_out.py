"""Lines are published as jobs whose ids do not change."""

from __future__ import annotations

import pytest

from headrace.broker.batches.errors import InputGone
from headrace.broker.batches.fan_out import FanOut
from headrace.broker.batches.plan import LinePlan
from headrace.broker.durable.stored_job import parse_job
from headrace.jetstream.errors import NotConnected, PayloadTooLarge, PublishUnknown, QueueFull
from tests.support.batch_fakes import SUBJECTS, Scene
from tests.unit.broker.batches.test_states import record
from tests.unit.broker.batches.test_validation import checked, line

DATA = b"".join(line(number) for number in range(1, 6))


def scene_of(data: bytes = DATA) -> tuple[Scene, FanOut, LinePlan]:
    scene = Scene()
    scene.files.stored["_", "file-1"] = data
    return scene, FanOut(scene.messaging, SUBJECTS, scene.files), checked(data)  # type: ignore[arg-type]


async def test_a_published_line_is_read_as_a_job_of_the_batch() -> None:
    scene, fan_out, plan = scene_of()
    batch = record("in_progress", endpoint="/v1/chat/completions", model="Org/M", expires_at=5000)
    assert not (await fan_out.publish(batch, await fan_out.lines(batch, plan, [3]))).full
    [(subject, data, headers, msg_id)] = scene.messaging.published
    assert subject == "hr.job.org-m._"
    job = parse_job(data, headers, tenant="_", seq=1, stored=100.0)
    assert (job.name, job.batch, job.custom_id, job.deadline) == (f"{batch.id}-3", batch.id, "c3", 5000.0)
    assert (job.endpoint, job.request_class, msg_id) == (batch.endpoint, "batch", job.name)
    assert b"say 3" in job.body


async def test_a_custom_id_cannot_add_headers() -> None:
    data = line(1, custom_id="a\r\nHr-Class: hi")
    scene, fan_out, plan = scene_of(data)
    batch = record("in_progress", model="m")
    await fan_out.publish(batch, await fan_out.lines(batch, plan, [1]))
    [(_, stored, headers, _)] = scene.messaging.published
    assert "\n" not in "".join(headers.values())
    assert parse_job(stored, headers, tenant="_", seq=1, stored=0.0).custom_id == "a\r\nHr-Class: hi"


async def test_a_full_queue_is_reported_and_the_rest_is_not_tried() -> None:
    scene, fan_out, plan = scene_of(b"".join(line(n) for n in range(1, 500)))
    batch = record("in_progress", model="m")
    tries = 0

    def refuse() -> None:
        nonlocal tries
        tries += 1
        raise QueueFull("full")

    scene.messaging.refuse = refuse
    assert (await fan_out.publish(batch, await fan_out.lines(batch, plan, range(1, 500)))).full
    assert tries < 100


async def test_an_unknown_outcome_is_repeated_and_then_left_to_the_caller() -> None:
    scene, fan_out, plan = scene_of()
    batch = record("in_progress", model="m")
    outcomes: list[Exception | None] = [PublishUnknown("?"), None]

    def refuse() -> None:
        if outcomes and (error := outcomes.pop(0)) is not None:
            raise error

    scene.messaging.refuse = refuse
    lines = await fan_out.lines(batch, plan, [1])
    assert not (await fan_out.publish(batch, lines)).full
    outcomes[:] = [PublishUnknown("?")] * 3
    with pytest.raises(PublishUnknown):
        await fan_out.publish(batch, lines)
    outcomes[:] = [NotConnected("down")]
    with pytest.raises(NotConnected):
        await fan_out.publish(batch, lines)


async def test_lines_that_no_message_can_carry_are_named() -> None:
    scene, fan_out, plan = scene_of()
    batch = record("in_progress", model="m")

    def refuse() -> None:
        raise PayloadTooLarge("large")

    scene.messaging.refuse = refuse
    assert (await fan_out.publish(batch, await fan_out.lines(batch, plan, [1, 2]))).too_large == (1, 2)


async def test_a_file_that_has_become_shorter_is_gone() -> None:
    scene, fan_out, plan = scene_of()
    scene.files.stored["_", "file-1"] = DATA[:-5]
    with pytest.raises(InputGone, match="has lost bytes"):
        await fan_out.lines(record(), plan, [5])
