"""Lists messages, cards and errors of which one ends a process, fills its memory or floods its log."""

from __future__ import annotations

from tests.attacks.attempt import Attempt, Cut

BASE = "broker/messages/requests.py"
CODEC = "broker/codec.py"
POISON = "unit/broker/test_poison.py"
DIRECTORY = "unit/broker/models/test_directory.py"

ATTEMPTS = (
    Attempt(
        "C3",
        "P",
        'an Envelope with `judge` "a b", with `deadline` inf or NaN',
        "dead letter",
        (f"{POISON}::test_a_request_is_refused_with_the_name_of_the_field",),
        "tokens and times have no bounds",
        (
            Cut(BASE, 'Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\\Z")]', "Token = Annotated[str, Meta()]"),
            Cut(BASE, "UnixTime = Annotated[float, Meta(ge=0.0, le=LATEST)]", "UnixTime = Annotated[float, Meta()]"),
        ),
    ),
    Attempt(
        "C3",
        "P",
        "header `Hr-Attempt` with 21 digits",
        "dead letter",
        (f"{POISON}::test_an_attempt_in_a_header_is_bounded",),
        "the number has no bounds",
        (Cut(CODEC, "if not 1 <= attempt <= MOST_ATTEMPTS:", "if False:"),),
    ),
    Attempt(
        "C3",
        "P",
        "msgpack nested 30,000 deep",
        "dead letter",
        (f"{POISON}::test_a_decoder_refuses_rubbish_and_mutations_and_raises_nothing_else",),
        "a RecursionError of a decoder is not foreseen",
        (Cut(CODEC, "UnicodeDecodeError, RecursionError, OverflowError)", "UnicodeDecodeError, OverflowError)"),),
    ),
    Attempt(
        "C3",
        "P",
        'one frame of worker "a.b" with the end of an unknown request: the frontend confirms no end any more',
        "dropped; a verdict that cannot be sent is not tried again",
        (f"{POISON}::test_a_verdict_that_cannot_be_sent_is_dropped_and_the_next_ones_go_out",),
        "the verdict is kept until it is sent",
        (
            Cut(
                "broker/ingress/requests.py",
                "worker, answers = self._answers.popitem()\n            self._send(worker, Answers(answers=answers))",
                "worker, answers = next(iter(self._answers.items()))\n"
                "            self._messaging.send(self._subjects.control(worker), encode(Answers(answers=answers)))\n"
                "            del self._answers[worker]",
            ),
        ),
    ),
    Attempt(
        "C3",
        "P",
        "`index` 10^12 of a tool call: a list of that length",
        "dropped",
        (f"{POISON}::test_no_tool_call_has_an_index_that_a_list_would_be_made_up_to",),
        "indices have no bounds",
        (Cut(BASE, "CallIndex = Annotated[int, Meta(ge=0, lt=MOST_CALLS)]", "CallIndex = int"),),
    ),
    Attempt(
        "C3",
        "P",
        "a card under a key that is not its pool",
        "ignored",
        (f"{DIRECTORY}::test_a_card_under_another_key_than_its_pool_is_ignored",),
        "the key is not compared",
        (Cut("broker/models/cards.py", "check_card_key(card, key)", "pass"),),
    ),
    Attempt(
        "C3",
        "P",
        "a card with a file that is missing: no later model is known",
        "the others are known",
        (f"{DIRECTORY}::test_a_card_whose_file_is_missing_keeps_no_other_model_from_being_known",),
        "cards are read one after the other",
        (
            Cut(
                "broker/models/directory.py",
                "task = self._reading[pool] = tasks.create_task(self._read(pool, card, Once(self._wanted.task_done)))",
                "await self._read(pool, card, Once(self._wanted.task_done))\n                    continue",
            ),
        ),
    ),
    Attempt(
        "C3",
        "P",
        "a stored message whose handling fails in a way that no check foresaw",
        "a dead letter, and the judge ends the request",
        ("unit/broker/test_dead_letters.py::test_a_request_becomes_a_dead_letter_and_its_judge_ends_it",),
        "the error goes on to the consumer",
        (Cut("broker/dead_letters.py", "self.bury(delivery, error)", "raise"),),
    ),
    Attempt(
        "C3",
        "P",
        "has a part end with code 78 once a deployment is ready: `up` ends",
        "the part is started again",
        ("unit/headrace/up/test_restart_policy.py::test_a_deployment_that_was_ready_never_ends_since_a_part_refuses_to_go_on",),
        "code 78 is final at any time",
        (
            Cut(
                "headrace/up/restart_policy.py",
                "if exit_code == EXIT_CONFIGURATION and not ready:",
                "if exit_code == EXIT_CONFIGURATION:",
            ),
        ),
    ),
    Attempt(
        "C3",
        "P",
        "all of these, and some thousand mutations of valid messages, at a running deployment",
        "every process is the one that it was, `/health` healthy, the next request answered",
        ("integration/headrace/test_malformed_messages.py::test_the_known_messages_end_nothing",),
        "tokens, times and attempts have no bounds, and no failure is buried",
        (
            Cut(BASE, 'Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\\Z")]', "Token = Annotated[str, Meta()]"),
            Cut(BASE, "UnixTime = Annotated[float, Meta(ge=0.0, le=LATEST)]", "UnixTime = Annotated[float, Meta()]"),
            Cut("broker/dead_letters.py", "self.bury(delivery, error)", "raise SystemExit(78) from error"),
        ),
    ),
    Attempt(
        "L3",
        "P",
        "the same error again and again",
        "the first ones are written, the rest counted",
        (
            (
                "unit/headrace/base/test_repeated_errors.py"
                "::test_a_flood_keeps_its_first_tracebacks_and_lines_and_the_next_window_says_what_is_missing"
            ),
        ),
        "lines are not left out",
        (
            Cut(
                "headrace/base/logs.py",
                "if count > LINES:\n            raise structlog.DropEvent",
                "if False:\n            raise structlog.DropEvent",
            ),
        ),
    ),
)
