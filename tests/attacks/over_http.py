"""Lists what strangers, tenants and web pages try at the port of HTTP."""

from __future__ import annotations

from tests.attacks.attempt import Attempt, Cut

GATE = "frontend/auth/gate.py"

ATTEMPTS = (
    Attempt(
        "C1",
        "N",
        "each route with no key and with a wrong one",
        "401 but for probes, where keys are in force",
        (
            "unit/frontend/auth/test_keys_in_force.py::test_without_a_valid_key_no_request_runs",
            "unit/frontend/auth/test_gate.py::test_what_no_route_has_needs_a_key_too",
        ),
        "the gate asks for no key; a path that no route has is open",
        (
            Cut(GATE, "if self._ring.in_force:", "if False:"),
            Cut("frontend/auth/gate.py", "if path.startswith(base)), ANY)", "if path.startswith(base)), OPEN)"),
        ),
    ),
    Attempt(
        "C1",
        "N",
        "reads keys and prompts on the network",
        "HTTPS where a certificate is given, and nothing in plain text",
        ("integration/frontend/test_tls.py::test_the_openai_client_streams_over_https_and_plain_http_gets_nothing",),
        "the certificate is not given to the server",
        (
            Cut(
                "frontend/serving.py",
                "ssl_context_factory=None if tls is None else lambda _config, _default: tls.context,",
                "ssl_context_factory=None,",
            ),
        ),
    ),
    Attempt(
        "C1",
        "T",
        "more requests and tokens than its key may have",
        "429 with `Retry-After`, before anything of the request is read or stored",
        (
            "unit/frontend/auth/test_quotas.py::test_requests_of_a_minute_end_with_a_429_that_says_when_to_come_back",
            "unit/frontend/auth/test_quotas.py::test_requests_at_once_are_limited_and_leave",
        ),
        "there is room for any request",
        (
            Cut(
                "frontend/auth/quotas.py",
                "def have_room(self, now: float) -> bool:",
                "def have_room(self, now: float) -> bool:\n        return True\n",
            ),
        ),
    ),
    Attempt(
        "H2",
        "T",
        "two headers in one request, of which two readers take one each",
        "400 on each route",
        ("unit/frontend/auth/test_gate.py::test_a_doubled_header_that_decides_is_refused",),
        "doubled headers pass",
        (Cut(GATE, "raise _doubled(name)", "pass"),),
    ),
    Attempt(
        "H2",
        "T",
        "names itself like the token of another's name",
        "404; names have 96 bits of hash",
        ("unit/jetstream/test_subjects.py::test_no_name_is_the_token_of_another_tenant",),
        "a name that looks like such a token is one",
        (Cut("jetstream/subjects.py", " and not _HASHED.search(tenant):", ":"),),
    ),
    Attempt(
        "H2",
        "T",
        "says with a key that it is another tenant",
        "403 without the scope `act_as`",
        (
            (
                "unit/frontend/auth/test_keys_in_force.py"
                "::test_the_tenant_is_the_keys_and_the_header_only_of_a_key_that_speaks_for_others"
            ),
        ),
        "the scope is not asked for",
        (Cut(GATE, 'if wanted != caller.tenant and "act_as" not in caller.scopes:', "if False:"),),
    ),
    Attempt(
        "H2",
        "T",
        "reads, changes or deletes what is another's, on every route with an id",
        "404",
        ("integration/frontend/test_tenants_apart.py::test_no_route_shows_or_changes_what_belongs_to_another_tenant",),
        "the store of answers compares no tenant",
        (Cut("broker/ingress/response_store.py", "if response.tenant != tenant:", "if False:"),),
    ),
    Attempt(
        "H3",
        "T",
        "another's prompt again, also with its salt",
        "`cached_tokens` 0 where keys are in force; **shared without keys**",
        ("integration/frontend/test_tenants_apart.py::test_counts_of_cached_tokens_tell_nothing_of_another_tenant",),
        "the salt has no tenant in it",
        (Cut("frontend/auth/caller.py", "f\"{tenant}\\0{asked or ''}\"", "f\"{asked or ''}\""),),
    ),
    Attempt(
        "H4",
        "T",
        "two `stop` strings of 10^6 characters, `n` 4",
        "400",
        ("unit/broker/test_jobs.py::test_a_parameter_may_be_as_large_as_its_limit_and_no_larger",),
        "the strings are not counted",
        (Cut("broker/jobs.py", '_check(sum(map(len, values)), param, chars, "characters in all")', "pass"),),
    ),
    Attempt(
        "H5",
        "T",
        "30 MB of `vllm_xargs`, or of `bad_words`",
        "400, nothing stored",
        ("unit/broker/test_jobs.py::test_a_parameter_may_be_as_large_as_its_limit_and_no_larger",),
        "`vllm_xargs` is not measured",
        (Cut("broker/jobs.py", '_check(_size(generation.extra), "vllm_xargs", EXTRA_BYTES, "bytes")', "pass"),),
    ),
    Attempt(
        "H5",
        "T",
        "many large requests: their payloads stay",
        "deleted at the end of the request",
        ("unit/broker/ingress/test_spill_store.py::test_a_payload_is_deleted_when_its_request_has_ended",),
        "nothing is deleted",
        (Cut("broker/ingress/spill_store.py", "elif self._tasks.is_open:", "elif False:"),),
    ),
    Attempt(
        "H5",
        "T",
        "fills the store of large requests",
        "429 `spill_full`, and nothing of the request is stored",
        ("unit/broker/ingress/test_spill_store.py::test_a_full_store_refuses_a_request_before_anything_of_it_is_stored",),
        "the room is not looked at",
        (Cut("broker/ingress/spill_store.py", "if 0 < state.max_bytes < state.bytes + size * OVERHEAD:", "if False:"),),
    ),
    Attempt(
        "H7",
        "N",
        "24 bodies of 32 MiB without an end",
        "frontend 156 → 413 MiB when it was tried, 16 of them 503",
        (
            (
                "integration/frontend/test_robust_bodies.py"
                "::test_slow_bodies_of_many_connections_take_no_more_memory_than_they_are_given"
            ),
        ),
        "arriving bytes are not counted",
        (Cut("frontend/http/bodies.py", "self._budget.add(self._peer, more)", "pass"),),
    ),
    Attempt(
        "H7",
        "N",
        "as many half heads as connections are allowed",
        "another client is answered, the first time after 0.5 s when it was tried",
        ("integration/frontend/test_robust_connections.py::test_at_the_limit_half_heads_give_way_to_new_connections",),
        "only idle connections give way",
        (
            Cut(
                "frontend/http/connections.py",
                "and (other.half_head or other.idle_since is not None)",
                "and (other.idle_since is not None and not other.half_head)",
            ),
        ),
    ),
    Attempt(
        "H7",
        "N",
        "heads that drip in",
        "408 after `frontend.header_timeout_s`",
        ("integration/frontend/test_robust_http.py::test_headers_that_drip_in_are_given_up",),
        "connections are not looked at",
        (Cut("frontend/http/connections.py", "if now - since <= limit:", "if True:"),),
    ),
    Attempt(
        "H7",
        "T",
        "fills the queues of stored jobs, over HTTP and over NATS",
        "own limit by number, bytes and tokens, 429",
        ("integration/broker/test_queue_quotas.py::test_a_frontend_refuses_before_anything_is_stored",),
        "usage is not compared with the limits",
        (Cut("broker/durable/quota.py", "total = used.plus(more)", "total = NOTHING"),),
    ),
    Attempt(
        "tenancy",
        "T",
        "names of tenants in headers, and ten thousand tenants of keys, to fill a frontend's metrics",
        "100 labels of tenants of keys, and one for all others",
        (
            "unit/frontend/test_metrics.py::test_a_name_of_a_header_is_no_label_unless_a_key_has_that_tenant",
            ("unit/frontend/test_metrics.py::test_ten_thousand_tenants_of_keys_have_no_more_series_than_the_setting_says"),
        ),
        "each has a label",
        (
            Cut(
                "frontend/metrics.py",
                "if len(self._series) < self._most and (own or self._known(tenant)):",
                "if True:",
            ),
        ),
    ),
    Attempt(
        "tenancy",
        "T",
        "stores three times what the store of answers takes, to push out another's",
        "its own oldest make room, all of the other's stay",
        (
            ("integration/broker/test_store_room.py::test_a_tenant_that_fills_the_store_pushes_out_only_its_own_answers"),
            "integration/broker/test_store_room.py::test_records_of_others_stay_as_well",
        ),
        "only the server makes room",
        (
            Cut(
                "broker/ingress/response_store.py",
                "while (over := self._total() - int((FULL - rest) * self._limit)) > 0:",
                "while False:",
            ),
        ),
    ),
    Attempt(
        "H7",
        "T",
        "a flood of 900 requests beside a tenant within its share",
        "that one waits a bounded time, see the threat model",
        (
            (
                "simulation/test_two_tenants.py"
                "::test_a_flood_of_one_tenant_costs_another_that_stays_within_its_share_a_bounded_wait"
            ),
        ),
        "all requests are of one tenant for the router",
        (
            Cut(
                "router/placement/virtual_tokens.py",
                "known = self._tenants.get(name)",
                'name = "all"\n        known = self._tenants.get(name)',
            ),
        ),
    ),
    Attempt(
        "M3",
        "W",
        "`Host` of another name, `Origin` of another site, a cross-site request",
        "403",
        (
            "unit/frontend/auth/test_gate.py::test_a_name_that_a_page_can_make_resolve_here_is_refused",
            "unit/frontend/auth/test_gate.py::test_pages_of_other_sites_are_refused",
            "unit/frontend/auth/test_gate.py::test_a_browser_that_hides_the_origin_still_says_that_the_site_is_another",
            "unit/frontend/auth/test_gate.py::test_a_page_gets_no_answer",
        ),
        "neither `Host` nor `Origin` is compared",
        (
            Cut("frontend/auth/gate.py", "if not self._any_host and name not in self._names and", "if False and"),
            Cut("frontend/auth/gate.py", "self._check_origin(origin, host)", "pass"),
            Cut("frontend/auth/gate.py", "elif fetch_site in _FOREIGN and method not in _SAFE:", "elif False:"),
        ),
    ),
    Attempt(
        "M3",
        "W",
        "JSON as `text/plain`, which needs no preflight",
        "415",
        ("unit/frontend/auth/test_gate.py::test_what_a_form_can_send_is_no_json",),
        "any content type is JSON",
        (
            Cut(
                "frontend/auth/gate.py",
                'if kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json")):',
                "if True:",
            ),
        ),
    ),
    Attempt(
        "L1",
        "N",
        "no `Host`, no version, `gzip, chunked`",
        "400",
        ("integration/frontend/test_robust_http.py::test_what_rfc_9112_forbids_and_a_foreign_name_get_no_answer",),
        "what RFC 9112 forbids is not looked for",
        (Cut(GATE, '_check_http(scope["http_version"], host, encoding)', "pass"),),
    ),
    Attempt(
        "L5",
        "T",
        "`service_tier`, `priority`, `x-headrace-worker`, `x-headrace-explain` without the scope",
        "403",
        ("unit/frontend/auth/test_keys_in_force.py::test_going_first_and_choosing_workers_are_rights",),
        "rights are not asked for",
        (
            Cut(
                "frontend/generation/job_options.py",
                'if tier.request_class == "hi":\n        caller.need',
                'if True:\n        return\n    if tier.request_class == "hi":\n        caller.need',
            ),
        ),
    ),
    Attempt(
        "L5",
        "T",
        "names another's session, in order to be put on that one's worker",
        "it is a session of its own",
        ("unit/router/placement/test_worker_view.py::test_a_session_of_the_same_name_is_another_one_for_another_tenant",),
        "a session belongs to a worker by its name alone",
        (
            Cut(
                "router/placement/cost.py",
                'session_column(f"{row.request.tenant}\\0{row.request.session}", columns',
                "session_column(row.request.session, columns",
            ),
        ),
    ),
    Attempt(
        "L6",
        "T",
        "media from other ports, from private addresses, by names that lead to them",
        "400, with one text for all",
        (
            "unit/frontend/media/test_fetch.py::test_only_ports_of_the_web_are_fetched_from",
            "unit/frontend/media/test_fetch.py::test_private_addresses_are_not_asked",
            "unit/frontend/media/test_fetch.py::test_a_name_with_any_private_address_is_not_asked",
            "unit/frontend/media/test_fetch.py::test_a_redirect_to_a_private_address_is_not_followed",
        ),
        "neither port nor address is looked at",
        (
            Cut(
                "frontend/prompts/media_fetch.py",
                "if target.port not in PORTS.values() and not self._limits.any_port:",
                "if False:",
            ),
            Cut("frontend/prompts/media_fetch.py", "if not self._limits.private:", "if False:"),
        ),
    ),
    Attempt(
        "L6",
        "T",
        "a redirect from `https` to `http`",
        "400",
        ("unit/frontend/media/test_fetch.py::test_a_redirect_from_https_to_http_is_not_followed",),
        "it is followed",
        (Cut("frontend/prompts/media_fetch.py", 'if scheme == "https" and target.scheme == "http":', "if False:"),),
    ),
    Attempt(
        "L6",
        "T",
        "learns from error texts which names and ports there are inside",
        "one text",
        (
            (
                "unit/frontend/media/test_fetch.py"
                "::test_a_name_that_is_not_there_one_that_is_private_and_a_port_that_is_no_web_server_look_the_same"
            ),
        ),
        "the text says why",
        (Cut("frontend/prompts/media_fetch.py", "return self.private or bool(self.domains)", "return True"),),
    ),
    Attempt(
        "web",
        "W",
        "calls the server from a page that `frontend.cors_origins` does not list",
        "403, and no header that lets the page read the answer",
        ("integration/frontend/test_robust_http.py::test_browsers_may_call_only_where_that_is_set",),
        "every origin is taken",
        (Cut("frontend/auth/gate.py", "if lowered in self._origins:", "if True:"),),
    ),
    Attempt(
        "web",
        "W",
        "has a browser guess types, frame pages or send the address of a page on",
        "each answer has the headers that forbid it",
        ("integration/frontend/test_robust_http.py::test_every_answer_tells_browsers_what_not_to_do_with_it",),
        "the headers are not sent",
        (Cut("frontend/serving.py", '("x-content-type-options", "nosniff"),', ""),),
    ),
    Attempt(
        "tenancy",
        "T",
        "a thousand names of tenants, to fill the metrics",
        "32 labels, and one for all others",
        ("unit/router/session/test_metrics.py::test_tenants_from_outside_cannot_fill_the_metrics",),
        "each has a label",
        (Cut("router/session/metrics.py", "if len(_tenants) < MAX_TENANTS:", "if True:"),),
    ),
    Attempt(
        "input",
        "N",
        "JSON that is nested deeply or has a million containers",
        "400 before it is decoded",
        ("unit/frontend/http/test_bodies.py::test_too_much_of_anything_is_refused",),
        "containers are not counted",
        (Cut("frontend/http/bodies.py", "if containers > settings.max_json_containers:", "if False:"),),
    ),
)
