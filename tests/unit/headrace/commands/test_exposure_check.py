"""`headrace up` and `frontend` on addresses that other machines reach."""

from __future__ import annotations

import pytest

from headrace.base.errors import SettingsError
from headrace.commands.run import check_exposure, check_logins
from headrace.config.options import Command
from headrace.config.settings import load


@pytest.mark.parametrize("command", ["up", "frontend"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5"])
def test_a_start_without_keys_is_refused_with_the_sentence_that_says_what_to_do(command: Command, host: str) -> None:
    with pytest.raises(SettingsError, match=r"--api-key .*--auth keys .*headrace keys create.*--insecure") as caught:
        check_exposure(load(command, flags={"frontend.host": host}))
    assert repr(host) in str(caught.value)


@pytest.mark.parametrize("enough", [{"api_key": "k"}, {"frontend.auth": "keys"}, {"frontend.insecure": True}])
def test_keys_or_the_word_are_enough(enough: dict[str, object]) -> None:
    check_exposure(load("up", flags={"frontend.host": "0.0.0.0", **enough}))


def test_the_embedded_nats_server_is_not_opened_by_keys_for_http() -> None:
    open_nats = {"server.host": "0.0.0.0", "api_key": "k", "server.login": "none"}
    with pytest.raises(SettingsError, match=r"server\.host.*no login"):
        check_exposure(load("up", flags=open_nats))
    check_exposure(load("up", flags={**open_nats, "frontend.insecure": True}))
    check_exposure(load("up", flags={**open_nats, "nats.url": "nats://broker:4222"}))
    for kind in ("one", "roles"):
        check_exposure(load("up", flags={**open_nats, "server.login": kind}))
    check_exposure(load("up", flags={"server.host": "0.0.0.0"}))  # it asks for one unless told otherwise


OTHER = {"up.pools": ['other={"engine": "sim"}']}


def test_workers_that_would_need_a_login_of_all_pools_are_refused_beside_others() -> None:
    own: dict[str, object] = {"worker.engine": "mine:Engine", "server.login": "roles"}
    with pytest.raises(SettingsError, match=r"first pool: only its engine 'mine:Engine' .*--served-name.*--nats-login one"):
        check_logins(load("up", flags={**own, **OTHER}))
    check_logins(load("up", flags=own))  # there is no other pool
    check_logins(load("up", flags={**own, **OTHER, "up.workers": "0"}))


@pytest.mark.parametrize(
    "enough",
    [
        {"worker.served_name": "m"},
        {"worker.model": "m"},
        {"server.login": "none"},
        {"server.login": "one"},
        {"nats.url": "nats://broker:4222"},
    ],
)
def test_a_name_for_their_model_is_enough_and_a_server_of_up_without_logins_of_roles_needs_none(
    enough: dict[str, object],
) -> None:
    check_logins(load("up", flags={"worker.engine": "mine:Engine", "server.login": "roles", **OTHER, **enough}))


def test_loopback_needs_nothing() -> None:
    check_exposure(load("up"))


@pytest.mark.parametrize("without", [{}, {"server.login": "none"}, {"server.login": "roles", "nats.url": "nats://broker:4222"}])
def test_tenants_are_not_left_without_the_logins_that_were_asked_for(without: dict[str, object]) -> None:
    asked = {"server.tenants": ["acme"]}
    with pytest.raises(SettingsError, match=r"server\.tenants = \['acme'\].*--nats-login roles"):
        check_logins(load("up", flags={**asked, **without}))
    check_logins(load("up", flags={**asked, "server.login": "roles"}))
