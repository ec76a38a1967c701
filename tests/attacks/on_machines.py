"""Lists what is tried with keys, by other users of a machine, and by operators by mistake."""

from __future__ import annotations

from tests.attacks.attempt import Attempt, Cut

STORE = "integration/jetstream/test_encrypted_store.py"
PRIVATE = "integration/headrace/test_private_deployment.py"
SECRETS = "headrace/config/values.py"
RING = "frontend/auth/key_ring.py"

ATTEMPTS = (
    Attempt(
        "M1",
        "N",
        "looks for sockets of NIXL and UCX, prefill and decode apart",
        "all on loopback; for vLLM and SGLang see the threat model",
        (f"{PRIVATE}::test_parts_that_hand_blocks_over_listen_on_loopback_only",),
        "UCX is told no device",
        (
            Cut(
                "headrace/up/worker_plan.py",
                'return {"UCX_NET_DEVICES": "lo"} if is_loopback(settings["server.host"]) else {}',
                "return {}",
            ),
        ),
    ),
    Attempt(
        "M2",
        "N",
        "looks for sockets of probes and metrics",
        "all on loopback",
        (f"{PRIVATE}::test_a_deployment_lets_in_its_user_and_its_keys_alone",),
        "probes listen on every address",
        (
            Cut(
                "headrace/commands/run.py",
                'offer_probes(composed.metrics_host, composed.metrics_port, state, default=probe_port(settings, "router"))',
                'offer_probes("0.0.0.0", composed.metrics_port, state, default=probe_port(settings, "router"))',
            ),
            Cut(
                "headrace/commands/run.py",
                'offer_probes(composed.metrics_host, composed.metrics_port, state, default=probe_port(settings, "worker"))',
                'offer_probes("0.0.0.0", composed.metrics_port, state, default=probe_port(settings, "worker"))',
            ),
        ),
    ),
    Attempt(
        "M4",
        "O",
        "a tenant wants all gone that is stored of it, and no other's",
        "`headrace tenant delete`; files are their user's alone (L2)",
        ("integration/headrace/test_tenant_command.py::test_a_deleted_tenant_is_gone_and_not_a_byte_of_another_one",),
        "dead letters are left out",
        (
            Cut(
                "broker/tenants.py",
                'self.places.append(Place(STREAMS["DLQ"], subjects.stream("DLQ"),',
                'str(Place(STREAMS["DLQ"], subjects.stream("DLQ"),',
            ),
        ),
    ),
    Attempt(
        "M4",
        "L",
        "has the disk, a backup or a snapshot of the store, and not its key",
        "with `--nats-encrypt aes` no prompt, key or answer is in a file; **in plain text without**",
        (f"{STORE}::test_no_file_holds_what_is_stored_unless_encryption_is_turned_off",),
        "the server is told no cipher",
        (Cut("jetstream/embedded_server.py", 'if settings.encrypt != "none" else []', "if False else []"),),
    ),
    Attempt(
        "M4",
        "O",
        "starts with another key, without the key, or without encryption, over an encrypted store",
        "refused before the server would leave out what it cannot decrypt",
        (f"{STORE}::test_an_encrypted_store_is_not_used_without_encryption_without_its_key_or_with_another",),
        "the key is not compared with what is stored",
        (
            Cut(
                "jetstream/embedded_server.py",
                '        if stored and bool(noted) != (self.settings.encrypt != "none"):',
                "        if False:",
            ),
            Cut("jetstream/embedded_server.py", "            if stored and noted != key_id:", "            if False:"),
        ),
    ),
    Attempt(
        "M5",
        "O",
        "an old nats-server, with published ways around permissions",
        "named in the log with the version to use",
        ("unit/jetstream/test_dial.py::test_a_version_with_published_ways_around_permissions_is_named",),
        "no version is known as unsafe",
        (
            Cut(
                "jetstream/dial.py",
                "SAFE_PATCHES = {(2, 11): 16, (2, 12): 7, (2, 13): 99, (2, 14): 3}",
                "SAFE_PATCHES: dict[tuple[int, int], int] = {}",
            ),
        ),
    ),
    Attempt(
        "M7",
        "L",
        "passwords `p@sslong` and `pa/ss` in an address that is logged, secrets nested in `engine_args`",
        "masked",
        (
            "unit/headrace/config/test_values.py::test_addresses_are_shown_without_users_and_passwords",
            "unit/headrace/config/test_values.py::test_secrets_inside_tables_are_masked_at_any_depth",
        ),
        "an address is masked up to its first @, tables at their top only",
        (
            Cut(SECRETS, r'''r"(^|://)((?:(?!://)[^\s])*)@"''', r'''r"(^|://)([^\s/@]*)@"'''),
            Cut(SECRETS, "else mask_table(item) for key, item", "else item for key, item"),
        ),
    ),
    Attempt(
        "M7",
        "L",
        "reads `ps` for the key and the password of the command line",
        "stars",
        ("unit/headrace/config/test_values.py::test_ps_shows_no_secret_of_the_command_line",),
        "the arguments are left as they are",
        (Cut(SECRETS, 'if texts and sys.platform == "linux":', "if False:"),),
    ),
    Attempt(
        "M7",
        "M",
        "an engine's model code reads the environment",
        "secrets are not in it",
        ("unit/headrace/config/test_values.py::test_a_part_gets_only_secrets_that_it_uses_and_hands_none_on",),
        "they are read and left there",
        (Cut(SECRETS, "environ.pop(name) for name", "environ[name] for name"),),
    ),
    Attempt(
        "M8",
        "O",
        "each command that changes something",
        "a line with its user in the log of each frontend",
        (
            (
                "integration/headrace/test_audit_announcements.py"
                "::test_commands_that_change_something_are_told_and_those_that_look_are_not"
            ),
        ),
        "commands tell nothing",
        (Cut("headrace/commands/control.py", "messaging.send(names.audit(),", "str(names.audit()) and str("),),
    ),
    Attempt(
        "M8",
        "T",
        "a wrong key, or what its key does not cover",
        "a line with its public id and the sender's address",
        (
            "unit/frontend/auth/test_key_ring.py::test_a_refused_key_is_named_by_its_id_and_its_senders_address",
            "unit/frontend/auth/test_key_ring.py::test_refusals_behind_the_gate_are_audited_too",
        ),
        "refusals are not written",
        (Cut("frontend/auth/key_ring.py", 'log.warning("audit.refused", code=code, **who(scope), **fields)', "pass"),),
    ),
    Attempt(
        "M9",
        "O",
        "`--host 0.0.0.0`, `--nats-host 0.0.0.0` without keys and logins",
        "code 78 with what to do",
        (
            (
                "unit/headrace/commands/test_exposure_check.py"
                "::test_a_start_without_keys_is_refused_with_the_sentence_that_says_what_to_do"
            ),
            "unit/headrace/commands/test_exposure_check.py::test_the_embedded_nats_server_is_not_opened_by_keys_for_http",
        ),
        "addresses are not looked at",
        (
            Cut(
                "headrace/commands/run.py",
                'if problem is not None:\n        raise SettingsError(f"frontend.host',
                'if False:\n        raise SettingsError(f"frontend.host',
            ),
            Cut(
                "headrace/commands/run.py",
                'if not is_loopback(host) and settings["server.login"] == "none" and',
                "if False and",
            ),
        ),
    ),
    Attempt(
        "L2",
        "L",
        "reads the data folder of a deployment that was started with umask 0",
        "folders 0700, files 0600",
        (f"{PRIVATE}::test_a_deployment_lets_in_its_user_and_its_keys_alone",),
        "the umask stays as it was",
        (Cut("headrace/base/process.py", "os.umask(0o077)", "os.umask(0)"),),
    ),
    Attempt(
        "keys",
        "L, P",
        "reads the bucket of keys",
        "hashes of 256 random bits",
        ("unit/broker/test_keys.py::test_what_is_stored_has_the_hash_and_not_the_key",),
        "the text is stored",
        (
            Cut(
                "broker/keys.py",
                "wish, id=key_id, hashes=[KeyHash(sha256=digest_of(text.encode()))]",
                "wish, id=key_id, hashes=[KeyHash(sha256=text.encode())]",
            ),
        ),
    ),
    Attempt(
        "keys",
        "T",
        "a revoked key at another frontend",
        "401 within a second",
        ("integration/frontend/test_api_keys.py::test_both_clients_work_with_a_key_and_every_frontend_hears_of_its_end",),
        "revoked keys stay good",
        (Cut(RING, "if not record.revoked:", "if True:"),),
    ),
    Attempt(
        "keys",
        "N",
        "measures how long a wrong key takes: with a known id, revoked, expired, right up to its last letter",
        "the same steps for each: one hash, one look-up, and no comparison of texts",
        ("unit/frontend/auth/test_key_ring.py::test_a_look_up_takes_the_same_steps_for_each_text_and_never_compares_it",),
        "keys are compared one after the other",
        (
            Cut(
                "frontend/auth/key_ring.py",
                "self._callers.get(digest_of(text))",
                "next((found for digest, found in self._callers.items() if digest == digest_of(text)), None)",
            ),
        ),
    ),
    Attempt(
        "keys",
        "T",
        "an expired key, and the old secret of a rotated one",
        "401 from that second on",
        ("unit/frontend/auth/test_key_ring.py::test_an_expired_key_and_an_old_secret_end_in_time",),
        "the time is not compared",
        (Cut(RING, "return caller if caller is not None and caller.until > now else None", "return caller"),),
    ),
    Attempt(
        "keys",
        "T",
        "routes and models that its key does not cover",
        "403 in the form of the API",
        (
            "unit/frontend/auth/test_keys_in_force.py::test_a_key_without_the_scope_is_refused",
            "unit/frontend/auth/test_keys_in_force.py::test_a_key_for_some_models_sees_and_uses_only_those",
        ),
        "every key covers all",
        (
            Cut("frontend/auth/caller.py", "if scope not in self.scopes:", "if False:"),
            Cut("frontend/auth/caller.py", "if not self._models:\n            return True", "return True"),
        ),
    ),
    Attempt(
        "keys",
        "N",
        "a token without signature, one signed with the public key, one for another audience, an expired one",
        "401",
        ("unit/frontend/auth/test_bearer_tokens.py::test_a_token_that_is_wrong_in_one_point_is_refused",),
        "nothing of a token is verified",
        (
            Cut(
                "frontend/auth/key_ring.py",
                'options={"require": ["exp", "iss", "aud", "sub"]},',
                'options={"verify_signature": False},',
            ),
        ),
    ),
    Attempt(
        "quotas",
        "T",
        "asks three frontends at once",
        "its limit, and at most what two others admit in a quarter of a second",
        (
            (
                "integration/frontend/test_shared_quotas.py"
                "::test_three_frontends_admit_together_what_one_may_and_at_most_a_rounds_worth_more"
            ),
        ),
        "frontends do not share their counts",
        (Cut("frontend/auth/quotas.py", "window.learn(number, total)", "pass"),),
    ),
)
