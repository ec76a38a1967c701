"""Lists what strangers try with the bytes of HTTP itself: where a request ends, and how slowly it comes."""

from __future__ import annotations

from tests.attacks.attempt import Attempt, Cut

CONNECTION = "frontend/http/client_connection.py"
SMUGGLING = "integration/frontend/test_smuggling.py::"
SLOW = "integration/frontend/test_slow_suites.py::"

ATTEMPTS = (
    Attempt(
        "L1",
        "N",
        "what suites against request smuggling send: CL.TE, TE.CL, TE.TE, CL.0, TE.0, chunks, line ends, in three ways each",
        "400 and the end of the connection, or one answer to each request",
        (f"{SMUGGLING}test_nothing_is_smuggled_past_a_request",),
        "a connection goes on behind a request that can be read in two ways",
        (Cut("frontend/http/exchange.py", "(BodyTooLarge, BodyTimeout, BadFraming)", "(BodyTooLarge, BodyTimeout)"),),
    ),
    Attempt(
        "L1",
        "N",
        "a request as the body of one that offers another protocol (`Upgrade`)",
        "it is the body; the offer is not taken",
        (f"{SMUGGLING}test_a_client_that_offers_another_protocol_is_answered_in_this_one",),
        "such a request ends with its head, as httptools has it",
        (Cut(CONNECTION, "self._body_parser = body_parser(self)", "pass"),),
    ),
    Attempt(
        "L1",
        "N, T",
        "a tenant, a key or an id as a trailer, past a proxy that checks headers",
        "trailers are not read",
        (f"{SMUGGLING}test_a_trailer_is_no_header",),
        "they are appended to the headers, as uvicorn has it",
        (Cut(CONNECTION, "if not self._in_head:\n            return", "if False:\n            return"),),
    ),
    Attempt(
        "L1",
        "N, W",
        "`GET http://evil.example/…` with the `Host` of this server, which a proxy and this server read differently",
        "403: the host of the target counts",
        ("integration/frontend/test_robust_http.py::test_the_host_of_an_absolute_target_counts_and_not_that_of_the_header",),
        "the header counts",
        (Cut(CONNECTION, "take_host_of_target(self.url, self.headers)", "pass"),),
    ),
    Attempt(
        "H7",
        "N",
        "a trailer, or the extension of a chunk, without an end",
        "the connection ends at `frontend.max_header_bytes`",
        (f"{SMUGGLING}test_what_is_no_content_of_a_body_is_bounded",),
        "it is not counted",
        (Cut(CONNECTION, "self._idle += len(data)", "pass"),),
    ),
    Attempt(
        "H7",
        "N",
        "100 clients that send slowly, as slowloris and slowhttptest `-H`, `-B`, `-R` do",
        "others are answered, each connection ends",
        (f"{SLOW}test_clients_that_send_slowly_are_ended_and_keep_nobody_from_an_answer",),
        "neither heads nor bodies have a deadline",
        (
            Cut("frontend/http/connections.py", "if now - since <= limit:", "if True:"),
            Cut("frontend/http/exchange.py", "asyncio.timeout(settings.body_timeout_s)", "asyncio.timeout(None)"),
        ),
    ),
    Attempt(
        "H7",
        "N",
        "100 clients that read nothing, as slowhttptest `-X` does",
        "others are answered, each connection ends after `frontend.slow_client_s`",
        (f"{SLOW}test_clients_that_read_nothing_are_ended_and_keep_nobody_from_an_answer",),
        "whole answers, which do not wait for the client, have no deadline",
        (
            Cut(CONNECTION, "self.full_since = self.loop.time()", "self.full_since = None"),
            Cut(CONNECTION, 'self.waits_since, self.owes = self.loop.time(), "end"  # a client that takes', "pass  #"),
        ),
    ),
)
