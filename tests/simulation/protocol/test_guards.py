"""Each rule of the job protocol matters: without it the search finds a broken promise."""

import pytest

from tests.simulation.guard_search import Report, assert_matters
from tests.simulation.protocol.configs import CONFIGS, GROUPS
from tests.simulation.protocol.guards import GUARDS

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

ALL = CONFIGS | GROUPS
# In which deployment, and the first seed that shows it: only a saving of time, see `guard_search.py`.
WHERE = {
    "a_router_decides_under_its_lease_only": ("window", 6),
    "a_request_is_placed_before_it_is_acked": ("window", 626),
    "a_judge_hears_of_a_refusal_before_the_ack": ("shed", 11),
    "a_full_worker_is_not_the_end": ("window", 327),
    "publish_before_delete": ("twopoison", 125),
    "a_moved_copy_is_a_new_attempt": ("twopoison", 0),
    "runs_are_keyed_by_sequence": ("redelivery", 9),
    "a_missing_consumer_is_made_again": ("colourful", 50),
    "a_payload_is_waited_for": ("spills", 36),
    "an_abort_names_a_run": ("colourful", 17),
    "an_end_is_confirmed_before_it_is_acked": ("preempted", 146),
    "an_unanswered_end_is_sent_again": ("nodedupe", 0),
    "a_lapsed_worker_asks_its_judges": ("lapsecrash", 45),
    "suspects_run_in_groups_that_are_small_enough": ("manypoison", 25),
    "ordinary_runs_do_not_start_beside_suspects": ("manypoison", 72),
    "a_suspect_is_not_granted_without_a_promise": ("manypoison", 5),
    "groups_shrink": ("1 of 64 on 2", 0),
    "progress_clears": ("6 kills on 3", 12),
    "progress_clears_only_well_past_the_crash": ("1 of 64 on 2", 0),
    "a_dead_engine_starts_nothing": ("manypoison", 1),
    "silence_is_no_verdict": ("handovers", 84),
    "no_verdict_right_after_a_reconnect": ("outages", 46),
    "a_lease_has_time_for_the_answers_of_a_slow_server": ("far", 92),
    "a_verdict_takes_a_fresh_read": ("cancels", 9),
    "nobody_works_for_a_judge_that_is_gone": ("ingresses", 20),
    "work_of_the_dead_is_moved": ("base", 0),
    "frames_of_other_runs_are_dropped": ("nodedupe", 0),
    "an_overlap_is_trimmed": ("colourful", 3),
    "a_gap_is_asked_after": ("engines", 2),
    "a_claim_sets_the_fence": ("twopoison", 0),
    "an_older_attempt_is_stale": ("noisypoison", 260),
    "a_check_adopts_like_a_first_frame": ("spills", 41),
    "a_refusal_is_fenced": ("shedonly", 313),
    "a_lapsed_judge_submits_again": ("lapsecrash", 33),
    "submitted_again_means_a_new_generation": ("lapsecrash", 40),
    "suspicions_are_not_crashes": ("manypoison", 0),
    "who_is_back_has_not_crashed": ("placing", 41),
    "who_drains_has_not_crashed": ("poisonfaults", 266),
    "the_death_of_an_engine_counts": ("enginepoison", 0),
    "a_started_event_is_evidence": ("5 of 64 on 6", 6),
    "crashes_end_a_request": ("twopoison", 0),
}


@pytest.mark.parametrize("name", GUARDS)
def test_without_it_a_promise_is_broken(name: str, record_property: Report) -> None:
    where, first = WHERE[name]
    assert_matters(GUARDS[name], ALL, where, first, report=record_property)
