import re

import pytest

from headrace.jetstream.provision import differences
from headrace.jetstream.specs import consumer_config
from headrace.jetstream.subjects import REQUEST_CLASSES, Subjects
from headrace.jetstream.topology import LONGEST_DEADLINE_S, Topology, request_consumer, request_stream, work_consumer

SUBJECTS = Subjects("hr")
TOPOLOGY = Topology(SUBJECTS)


def takes(pattern: str, subject: str) -> bool:
    regex = re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+")
    return re.fullmatch(regex, subject) is not None


def streams_for(subject: str) -> list[str]:
    return [s.name for s in TOPOLOGY.all_streams() if any(takes(p, subject) for p in s.subjects)]


@pytest.mark.parametrize(
    ("subject", "stream"),
    [
        (SUBJECTS.req("p", "hi"), "HR_REQ"),
        (SUBJECTS.req("p", "std", "t"), "HR_REQ"),
        (SUBJECTS.req("p", "batch", "t"), "HR_REQ"),
        (SUBJECTS.req("p", "re", "t"), "HR_MOVED"),
        (SUBJECTS.req("p", "rb", "t"), "HR_MOVED"),
        (SUBJECTS.work("p", "w"), "HR_WORK"),
        (SUBJECTS.job("p", "t"), "HR_JOB"),
        (SUBJECTS.prefill("p"), "HR_PREFILL"),
        (SUBJECTS.prefill("p", "w"), "HR_PREFILL"),
        (SUBJECTS.kv("p", "w"), "HR_KV"),
        (SUBJECTS.load("p", "w"), "HR_LOAD"),
        (SUBJECTS.rsp("t", "j"), "HR_RSP"),
        (SUBJECTS.result("t", "j"), "HR_RESULT"),
        (SUBJECTS.dlq("p"), "HR_DLQ"),
        ("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.HR_WORK.W_w", "HR_DLQ"),
        ("$KV.hr_members.worker.p.w", "KV_hr_members"),
        ("$O.hr_spill.C.x", "OBJ_hr_spill"),
    ],
)
def test_every_durable_subject_lies_in_exactly_one_stream(subject: str, stream: str) -> None:
    assert streams_for(subject) == [stream]


@pytest.mark.parametrize(
    "subject",
    [SUBJECTS.out("i"), SUBJECTS.events("p"), SUBJECTS.control("c"), SUBJECTS.cancel("p"), SUBJECTS.find("p")],
)
def test_core_subjects_lie_in_no_stream(subject: str) -> None:
    assert streams_for(subject) == []


def test_the_request_of_a_stored_job_may_wait_in_its_queue_until_the_longest_deadline() -> None:
    ages = {spec.name: spec.max_age_s for spec in TOPOLOGY.all_streams()}
    assert min(ages[name] for name in ("HR_REQ", "HR_MOVED", "HR_JOB", "OBJ_hr_spill")) > LONGEST_DEADLINE_S


def test_advisories_of_other_deployments_are_not_kept() -> None:
    assert streams_for("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.OTHER_WORK.W_w") == []


def test_moved_requests_have_no_cap_and_waiting_ones_have() -> None:
    by_name = {s.name: s for s in TOPOLOGY.streams()}
    req, moved = by_name["HR_REQ"], by_name["HR_MOVED"]
    assert req.discard_new_per_subject
    assert req.max_msgs_per_subject == TOPOLOGY.tenant_cap
    assert (moved.max_msgs_per_subject, moved.max_msgs, moved.max_bytes) == (-1, -1, -1)
    assert not moved.discard_new_per_subject


@pytest.mark.parametrize("request_class", REQUEST_CLASSES)
def test_a_request_consumer_reads_the_stream_its_subjects_lie_in(request_class: str) -> None:
    spec = request_consumer(SUBJECTS, "p", request_class)  # type: ignore[arg-type]
    subject = SUBJECTS.req("p", request_class, "t")  # type: ignore[arg-type]
    assert streams_for(subject) == [spec.stream] == [request_stream(SUBJECTS, request_class)]  # type: ignore[arg-type]
    assert takes(spec.filter_subjects[0], subject)
    config = consumer_config(spec)
    assert (config["priority_groups"], config["priority_policy"]) == (["g"], "prioritized")
    assert config["ack_wait"] == 3_000_000_000


def test_a_work_consumer_reads_one_worker_and_has_no_rivals() -> None:
    config = consumer_config(work_consumer(SUBJECTS, "p", "w"))
    assert config["filter_subject"] == "hr.work.p.w"
    assert "priority_groups" not in config
    assert config["inactive_threshold"] == 900 * 10**9
    assert config["max_deliver"] == -1


def test_buckets_keep_one_revision_so_that_short_leases_stay_short() -> None:
    for bucket in TOPOLOGY.buckets():
        stream = bucket.stream()
        assert stream.max_msgs_per_subject == 1
        assert stream.allow_msg_ttl
        assert stream.marker_ttl_s > 0


def test_only_leases_are_kept_in_memory_so_that_a_full_disk_ends_none() -> None:
    storage = {bucket.name: bucket.stream().config()["storage"] for bucket in TOPOLOGY.buckets()}
    assert storage.pop(TOPOLOGY.subjects.bucket("members")) == "memory"
    assert set(storage.values()) == {"file"}


def test_every_stream_says_what_it_is_for_and_whose_it_is() -> None:
    for spec in TOPOLOGY.all_streams():
        assert spec.description
        assert spec.config()["metadata"]["owner"] == "headrace"


def test_a_duplicate_window_is_never_longer_than_the_messages_live() -> None:
    for spec in TOPOLOGY.all_streams():
        config = spec.config()
        assert not config["max_age"] or config["duplicate_window"] <= config["max_age"]


def test_differences_are_named_field_by_field() -> None:
    wanted = TOPOLOGY.streams()[0].config()
    current = {**wanted, "max_msgs": 5, "metadata": {**wanted["metadata"], "_nats.level": "1"}, "sealed": False}
    current["subjects"] = list(reversed(wanted["subjects"]))
    del current["deny_delete"]
    (change,) = differences(current, wanted)
    assert (change.name, change.current, change.wanted) == ("max_msgs", 5, TOPOLOGY.request_cap)
