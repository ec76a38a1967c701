"""Names of jobs: tokens are safe in subjects, ids are apart for each tenant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.names import Nonces, check_name, job_id, job_of_run, job_token, new_nonce, run_id
from headrace.jetstream.subjects import Subjects

NAMES = st.text(min_size=1, max_size=80)


@given(NAMES)
def test_every_name_has_a_token_that_a_subject_takes(name: str) -> None:
    assert Subjects().result("_", job_token(name)).endswith(job_token(name))


@given(NAMES, NAMES)
def test_different_names_have_different_tokens(one: str, other: str) -> None:
    assert (job_token(one) == job_token(other)) == (one == other)


def test_a_name_cannot_take_the_token_of_another_that_is_hashed() -> None:
    hashed = job_token("a b")
    assert job_token(hashed) != hashed


def test_a_plain_name_is_its_own_token() -> None:
    assert job_token("order-17_b") == "order-17_b"


def test_two_tenants_never_share_a_job() -> None:
    assert job_id("a", "job") != job_id("b", "job")


@given(NAMES)
def test_the_job_of_a_run_is_found_by_its_id(name: str) -> None:
    job = job_id("_", name)
    for part in (0, 3):
        run = run_id(job, new_nonce(), part)
        assert len(run) <= 64
        assert job_of_run(run) == job


def test_a_request_that_is_no_job_is_its_own() -> None:
    assert job_of_run("0123abcd") == "0123abcd"


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb"])
def test_a_name_that_no_log_line_could_show_is_refused(name: str) -> None:
    with pytest.raises(JobMalformed, match="256 printable"):
        check_name(name)


def test_no_two_deliveries_share_a_name_at_one_carrier_or_at_two() -> None:
    one, other = Nonces(), Nonces()
    names = [nonces.next() for nonces in (one, other) for _ in range(300)]
    assert len(set(names)) == len(names)
    assert all(len(run_id(job_id("_", "job"), name, 999)) <= 64 for name in names)
