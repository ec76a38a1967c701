"""Lists what processes with access to NATS try: messages that end others, names that are not theirs, ways around the lists."""

from __future__ import annotations

from tests.attacks.attempt import Attempt, Cut

CLIENT = "jetstream/client.py"
LISTS = "jetstream/logins/roles.py"
LOGINS = "jetstream/logins/nkey_logins.py"

STOLEN = "integration/jetstream/test_stolen_logins.py"
POOLS = "integration/jetstream/test_stolen_pools.py"
WORKER = "integration/jetstream/test_stolen_worker.py"
DIRECTORY = "unit/broker/models/test_directory.py"

TWO_ACCOUNTS = """    lines = ["accounts {", f"  {account}: {{", "    jetstream: enabled", "    exports: ["]
    for subject in exported:
        kind = ", response_type: stream" if subject == API_EXPORT else ""  # a pull and a batch have many answers
        lines.append(f"      {{ service: {json.dumps(subject)}, accounts: [{account}_PARTS]{kind} }}")
    lines += ["    ]", "  }", f"  {account}_PARTS: {{", "    imports: ["]
    for subject in exported:
        to = f", to: {json.dumps(f'{PARTS_API}.>')}" if subject == API_EXPORT else ""
        lines.append(f"      {{ service: {{ account: {account}, subject: {json.dumps(subject)} }}{to} }}")
    lines += ["    ]", "    users: ["]
"""
ONE_ACCOUNT = """    lines = ["accounts {", f"  {account}_PARTS: {{", "    jetstream: enabled", "    users: ["]
"""
OWN_API = Cut(LISTS, 'PARTS_API = "JS.HR.API"', 'PARTS_API = "$JS.API"')  # as it is called in the account of the streams

ATTEMPTS = (
    Attempt(
        "C2",
        "P, L",
        "connects without a login",
        "refused, unless `--nats-login none` was asked for",
        (
            "integration/headrace/test_up_one_login.py::test_another_process_of_the_machine_hears_and_stores_nothing",
            "integration/headrace/test_up_logins.py::test_nobody_connects_without_a_login",
        ),
        "the one login is not asked for, and with roles who has none is taken for the operator",
        (
            Cut(
                "jetstream/logins/nkey_logins.py",
                'return f"authorization {{ users: [ {{ nkey: {user_key(folder, name)} }} ] }}\\n"',
                'return f"# {user_key(folder, name)}\\n"',
            ),
            Cut(
                LOGINS,
                '''return "\\n".join([*lines, "    ]", "  }", "}"]) + "\\n"''',
                '''return "\\n".join([*lines, "    ]", "  }", "}", f"no_auth_user: {keys[Login('operator')]}"]) + "\\n"''',
            ),
        ),
    ),
    Attempt(
        "C2",
        "P",
        "tokens, claims, leases, load, cache events and a drain in another worker's name",
        "refused by the server",
        (f"{WORKER}::test_it_writes_nothing_in_the_name_of_another",),
        "the lists of a worker have a wildcard in the place of its id",
        (
            Cut(LISTS, 'me = f"{book.pool}.{book.worker}"', 'me = f"{book.pool}.*"'),
            Cut(
                LISTS,
                'self.record("members", f"worker.{self.pool}.{self.worker}")',
                'self.record("members", f"worker.{self.pool}.*")',
            ),
            Cut(LISTS, 'f"drained.{book.worker}"', '"drained.*"'),
        ),
    ),
    Attempt(
        "C2",
        "P",
        "injects an answer before the worker's: another's name inside a frame, a request of another pool",
        "dropped by the ingress",
        (
            "unit/broker/ingress/test_inbox.py::test_a_frame_counts_in_the_name_of_its_sender_and_for_its_pool",
            "unit/broker/ingress/test_inbox.py::test_an_inbox_drops_what_is_said_in_the_name_of_others",
        ),
        "the sender of a frame is not compared",
        (Cut("broker/ingress/inbox.py", "if frame.worker != sender.worker:", "if False:"),),
    ),
    Attempt(
        "C2",
        "P",
        "takes over a model by a card that names it",
        "the pool that has the name keeps it",
        (f"{DIRECTORY}::test_a_card_of_another_pool_cannot_take_the_name_of_a_model",),
        "the oldest card has the name",
        (
            Cut(
                "broker/models/directory.py",
                "card.pool != pool_id(card.model, card.namespace),\n            self._pools.get(card.model) != card.pool,\n",
                "False,\n            False,\n",
            ),
        ),
    ),
    Attempt(
        "C2",
        "P",
        "a card that is not signed, or was changed since",
        "refused by the frontend, and counted",
        (
            "unit/broker/models/test_cards.py::test_a_card_that_was_changed_since_is_refused",
            "unit/broker/models/test_cards.py::test_a_forged_card_is_counted_and_said",
        ),
        "signatures are not compared",
        (
            Cut(
                "broker/models/cards.py",
                "if key and not hmac.compare_digest(card.signature, _signature(card, key)):",
                "if False:",
            ),
        ),
    ),
    Attempt(
        "C2",
        "P",
        "to make, change, purge or delete streams, with the login of any part",
        "refused by the server",
        ("unit/jetstream/logins/test_roles.py::test_only_an_operator_changes_or_copies_streams",),
        "every part may call all of JetStream",
        (Cut(LISTS, 'self.api("INFO", "STREAM.NAMES")', 'self._publish.add(f"{PARTS_API}.>")'),),
    ),
    Attempt(
        "H1",
        "P",
        "each call that a worker may make, with 14 reply subjects: streams, buckets, queues, the API",
        "nothing is stored or changed",
        (f"{STOLEN}::test_an_answer_of_the_server_is_no_way_around_the_lists",),
        "streams and parts are in one account",
        (Cut(LOGINS, TWO_ACCOUNTS, ONE_ACCOUNT), OWN_API),
    ),
    Attempt(
        "H1",
        "P",
        "has bytes of its choice delivered as a message of a process",
        "dropped",
        (f"{STOLEN}::test_a_message_of_a_stream_is_not_taken_for_one_of_a_process",),
        "subscriptions take what the server has read from a stream",
        (
            Cut(
                CLIENT,
                "if not sent_to.covers(subject) or (headers is not None and from_stream(headers)):",
                "if False:",
            ),
        ),
    ),
    Attempt(
        "H1",
        "P",
        "asks another part, with a bucket, a queue or another worker as the reply subject",
        "no answer",
        (
            f"{STOLEN}::test_a_part_answers_at_inboxes_only",
            f"{WORKER}::test_it_cannot_have_its_questions_answered_to_another",
        ),
        "answers go where the asker says",
        (Cut(CLIENT, 'answer_at = reply.decode() if reply.startswith(INBOXES) else ""', "answer_at = reply.decode()"),),
    ),
    Attempt(
        "H1",
        "P",
        "a consumer that delivers elsewhere, or reads another pool",
        "refused by the steward",
        (f"{STOLEN}::test_the_steward_makes_no_consumer_that_delivers_or_reads_elsewhere",),
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
        "placed requests of another pool: reads, deletes, pulls",
        "refused by the steward",
        (f"{POOLS}::test_placed_requests_of_another_pool_cannot_be_read_deleted_or_pulled_by_the_steward",),
        "the steward does not look at what a call touches",
        (Cut("jetstream/logins/roles.py", "if not any(one.covers(subject.encode()) for one in reach):", "if False:"),),
    ),
    Attempt(
        "H1",
        "P",
        "what is placed on a worker beside it that lives",
        "refused by the steward",
        (f"{WORKER}::test_it_cannot_read_or_take_what_is_placed_on_a_worker_that_lives",),
        "leases are not looked at",
        (
            Cut(
                "jetstream/logins/steward.py",
                "return await leases.get(subjects.worker_key(parts[2], parts[3])) is not None",
                "return False",
            ),
        ),
    ),
    Attempt(
        "H1",
        "P",
        "names of tenants from the descriptions of streams",
        "the steward lists none",
        (f"{STOLEN}::test_a_part_that_was_taken_over_learns_no_names_of_tenants_from_a_streams_description",),
        "the steward lists what it is asked for",
        (
            Cut(
                "jetstream/logins/roles.py",
                "any(_within_pattern(wanted, one) for one in counted)):",
                "True):",
            ),
        ),
    ),
    Attempt(
        "H1",
        "T",
        "results, jobs or counts of another tenant, with a tenant's own login",
        "refused by the server",
        (f"{STOLEN}::test_a_tenant_reads_its_own_results_only",),
        "its list has a wildcard in the place of the tenant",
        (Cut(LISTS, 'f"DIRECT.GET.{result}.{book.p}.result.{tenant}.*")', 'f"DIRECT.GET.{result}.{book.p}.result.*.*")'),),
    ),
    Attempt(
        "H8",
        "P",
        "a drain, a change of role or an adapter where judges and workers write",
        "refused, and counted; commands have a subject of their own",
        ("unit/broker/worker/test_inbox.py::test_a_command_that_comes_where_workers_and_judges_write_is_refused",),
        "commands are taken wherever they come",
        (
            Cut(
                "broker/worker/inbox.py",
                "        if isinstance(control, OPERATORS):\n            metrics",
                "        if False:\n            metrics",
            ),
        ),
    ),
    Attempt(
        "H8",
        "P",
        "publishes to that subject with the login of a worker",
        "refused by the server",
        ("unit/jetstream/logins/test_roles.py::test_no_worker_commands_a_worker",),
        "a worker's list has the subject of commands",
        (Cut(LISTS, 'book.tell(f"out.*.{me}",', 'book.tell("adm.worker.*.*", f"out.*.{me}",'),),
    ),
    Attempt(
        "L7",
        "P",
        "connections and subscriptions without end",
        "4,096 and 8,192",
        ("integration/jetstream/test_embedded_server.py::test_connections_and_their_subscriptions_are_bounded",),
        "the server is told no limits",
        (
            Cut("jetstream/embedded_server.py", '        f"max_connections: {settings.max_connections}",\n', ""),
            Cut("jetstream/embedded_server.py", '        f"max_subscriptions: {settings.max_subscriptions}",\n', ""),
        ),
    ),
    Attempt(
        "TLS",
        "N",
        "connects to NATS without TLS, without a client's certificate, with a strange one",
        "refused, and told why",
        ("integration/jetstream/test_tls.py::test_a_client_is_refused_soon_and_told_why",),
        "the server asks for no certificate of clients",
        (
            Cut(
                "jetstream/embedded_server.py",
                "f\"  verify: {'true' if settings.tls_client_ca is not None else 'false'}\"",
                '"  verify: false"',
            ),
        ),
    ),
    Attempt(
        "TLS",
        "N",
        "stands between a part and NATS and offers no TLS, to be sent a password",
        "nothing is said to it",
        ("integration/jetstream/test_tls.py::test_nothing_is_said_to_a_server_without_tls_when_tls_is_asked_for",),
        "the client goes on without TLS",
        (Cut("jetstream/dial.py", "core.tls_only = options.wants_tls", "core.tls_only = False"),),
    ),
    Attempt(
        "NATS",
        "P",
        "a large payload or result of another pool, in the store that all pools share",
        "encrypted under a key that its request has; a change is noticed",
        (
            "integration/broker/test_sealed_objects.py::test_a_large_prompt_is_read_by_who_has_its_request_only",
            "integration/broker/test_sealed_objects.py::test_a_large_result_of_a_worker_is_read_by_its_ingress_only",
        ),
        "it is stored as it is",
        (
            Cut(
                "broker/spill.py",
                "    key = nacl.utils.random(nacl.secret.SecretBox.KEY_SIZE)\n",
                '    return b"", data\n    key = nacl.utils.random(nacl.secret.SecretBox.KEY_SIZE)\n',
            ),
        ),
    ),
    Attempt(
        "NATS",
        "P",
        "KV blocks and embeddings of another pool",
        "refused by the server",
        (f"{POOLS}::test_a_worker_reaches_no_kv_blocks_and_no_embeddings_of_another_pool",),
        "a worker's list has the calls of every stream",
        (Cut(LISTS, 'self.api(*(f"{call}.OBJ_{store}" for call in', 'self.api(*(f"{call}.*" for call in'),),
    ),
    Attempt(
        "NATS",
        "P",
        "pulls prefill jobs of another pool",
        "no consumer has a name that it can know",
        (f"{POOLS}::test_a_worker_pulls_no_prefill_jobs_of_another_pool",),
        "names have no secret in them",
        (
            Cut(
                "jetstream/topology.py",
                "name=subjects.prefill_consumer(pool, worker, secret),",
                'name=subjects.prefill_consumer(pool, worker, ""),',
            ),
        ),
    ),
    Attempt(
        "NATS",
        "P",
        "hears more by a wildcard",
        "refused by the server",
        ("integration/jetstream/test_permissions.py::test_nobody_hears_more_by_a_wildcard",),
        "a role may hear all of the deployment",
        (
            Cut(
                LISTS,
                'self._subscribe: set[str] = {f"{login.inbox}.>"}',
                'self._subscribe: set[str] = {f"{login.inbox}.>", ">"}',
            ),
        ),
    ),
)
