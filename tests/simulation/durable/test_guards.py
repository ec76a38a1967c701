"""Each rule of durable work matters: without it the search finds a broken promise."""

import pytest

from tests.simulation.durable.configs import CONFIGS
from tests.simulation.durable.guards import GUARDS
from tests.simulation.guard_search import Report, assert_matters

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

# In which deployment, and the first seed that shows it: only a saving of time, see `guard_search.py`.
WHERE = {
    "a_refused_result_is_not_one_that_exists": ("full", 11),
    "an_object_is_deleted_only_when_another_result_is_seen": ("large", 4),
    "a_result_is_created_once": ("late_cancel", 51),
    "a_job_is_acked_after_its_result": ("plain", 0),
    "the_end_is_in_the_stream_before_the_result": ("expire", 96),
    "entries_name_the_last_one": ("late_cancel", 13),
    "an_entry_of_another_writer_is_a_loss": ("late_cancel", 12),
    "a_stream_is_folded_before_its_job_is_submitted": ("two_routers", 0),
    "the_end_of_a_stream_is_read_before_anything_else": ("cancel", 11),
    "what_resumes_is_claimed": ("two_routers", 0),
    "a_canceller_is_told_the_end_that_stands": ("late_cancel", 51),
    "a_stream_is_cancelled_in_the_stream": ("cancel", 6),
    "a_malformed_job_has_an_end": ("malformed", 0),
    "jobs_without_a_carrier_are_swept": ("no_workers", 0),
    "carriers_that_died_of_a_job_are_counted": ("carrier_poison", 0),
    "a_carrier_that_goes_on_says_so": ("carriers_die", 82),
    "deliveries_are_no_evidence": ("routed", 0),
    "a_crash_is_stored_before_the_next_worker_goes_on": ("poison_and_deaths", 182),
}


@pytest.mark.parametrize("name", GUARDS)
def test_without_it_a_promise_is_broken(name: str, record_property: Report) -> None:
    where, first = WHERE[name]
    assert_matters(GUARDS[name], CONFIGS, where, first, report=record_property)
