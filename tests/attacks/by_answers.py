"""Lists what processes with a login at NATS try by answers that others wait for, and by what the server does for a writer."""

from __future__ import annotations

from tests.attacks.attempt import Attempt, Cut
from tests.attacks.over_nats import CLIENT, LOGINS, ONE_ACCOUNT, OWN_API, TWO_ACCOUNTS

ANSWERS = "integration/jetstream/test_stolen_answers.py"

ATTEMPTS = (
    Attempt(
        "H1",
        "P",
        "with each role, each call that it may make, with each subject that it may not publish to as the reply subject",
        "nothing is stored there",
        (f"{ANSWERS}::test_no_answer_of_the_server_is_stored_where_its_asker_may_not_publish",),
        "streams and parts are in one account",
        (Cut(LOGINS, TWO_ACCOUNTS, ONE_ACCOUNT), OWN_API),
    ),
    Attempt(
        "H1",
        "P",
        "the same with the subjects on which other processes hear",
        "dropped, or the server's JSON, which no part reads as a message",
        (f"{ANSWERS}::test_no_answer_of_the_server_is_heard_as_a_message_of_a_process",),
        "subscriptions take what the server has read from a stream",
        (
            Cut(
                CLIENT,
                "if not sent_to.covers(subject) or (headers is not None and from_stream(headers)):",
                "if not sent_to:",
            ),
        ),
    ),
    Attempt(
        "H1",
        "P",
        "with each role, a consumer that pushes to a worker",
        "refused by the steward",
        (f"{ANSWERS}::test_no_role_is_given_a_consumer_that_pushes",),
        "the steward makes what it is asked for",
        (
            Cut(
                "jetstream/logins/steward.py",
                "(why := refusal(self._topology, login, wish.call, wish.body or {})):",
                '(why := ""):',
            ),
        ),
    ),
    Attempt(
        "H1",
        "P",
        "is asked by a router, and answers its other questions, and those that the server is asked",
        "it knows the place of no other answer",
        (f"{ANSWERS}::test_who_is_asked_cannot_answer_another_question",),
        "all answers arrive at one inbox, counted",
        (Cut(CLIENT, "timeout_s=timeout_s, shown=True)", "timeout_s=timeout_s)"),),
    ),
    Attempt(
        "H1",
        "P",
        "takes the id of the next renewal of another worker's lease, so that the server drops that as a repetition",
        "ids cannot be guessed",
        (f"{ANSWERS}::test_the_id_of_a_write_cannot_be_guessed_and_taken",),
        "ids are counted up",
        (
            Cut(
                "jetstream/watch.py",
                "import secrets\n",
                "import secrets\n\nfrom headrace.jetstream.raw_client import NUID\n\n_ids = NUID()\n",
            ),
            Cut("jetstream/watch.py", "msg_id=secrets.token_hex(16),", "msg_id=_ids.next().decode(),"),
        ),
    ),
    Attempt(
        "H1",
        "P, T",
        "one write of its own with `Nats-Rollup: all`, which would remove all else from a queue",
        "refused by the server",
        (f"{ANSWERS}::test_no_header_of_a_write_removes_what_others_have_stored_in_a_queue",),
        "streams take that header",
        (Cut("jetstream/specs.py", '"allow_rollup_hdrs": self.allow_rollup_hdrs', '"allow_rollup_hdrs": True'),),
    ),
    Attempt(
        "H1",
        "P",
        "the same with its lease, in the bucket of all leases, where the server takes that header",
        "it is named in the log, and no lease is lost: their holders write them again",
        (f"{ANSWERS}::test_a_worker_that_removes_all_leases_is_named_and_no_lease_is_lost",),
        "watches do not look at that header",
        (Cut("jetstream/watch.py", 'if fields.get(wire.ROLLUP) == "all" and', "if False and"),),
    ),
)
