"""The state of an elector as an orchestrator asks for it."""

from __future__ import annotations

from headrace.commands.elector import standing
from headrace.commands.run import probe_port
from headrace.config.settings import load
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.elections.elector import Elector

SERVERS = ("nats://a:4222", "nats://b:4222", "nats://c:4222")


class Connected(Elector):
    """An elector that says what it is connected to."""

    names: tuple[str, ...] = ()
    told = False

    @property
    def servers(self) -> list[str]:
        return list(self.names)

    @property
    def ready(self) -> bool:
        return self.told and bool(self.names)


def test_it_is_ready_while_it_would_see_a_death_and_healthy_while_it_is_connected_to_all() -> None:
    elector = Connected(ConnectOptions(servers=SERVERS))
    assert (standing(elector).ready, standing(elector).why) == (False, "connected to 0 of 3 servers")
    elector.names = ("a", "b", "c")
    assert (standing(elector).ready, standing(elector).why) == (False, "it has heard of no raft groups")
    elector.told = True
    assert (standing(elector).ready, standing(elector).healthy, standing(elector).why) == (True, True, "")
    elector.names = ("a", "b")
    assert (standing(elector).ready, standing(elector).healthy) == (True, False)
    assert standing(elector).facts == {"servers": ["a", "b"], "addresses": 3}


def test_an_elector_that_has_heard_nothing_is_not_ready() -> None:
    assert not Elector(ConnectOptions(servers=SERVERS)).ready


def test_a_user_without_a_password_has_an_empty_one() -> None:
    """Without a password nats-py would not send the user either, and the login would be nobody's."""
    assert Elector(ConnectOptions(servers=SERVERS, user="elector"))._options.password == ""
    assert Elector(ConnectOptions(servers=SERVERS))._options.password is None
    assert Elector(ConnectOptions(servers=SERVERS, user="elector", password="p"))._options.password == "p"


def test_in_a_pod_its_probes_are_on_a_port_of_their_own() -> None:
    assert probe_port(load("elector"), "elector") is None
    assert probe_port(load("elector", flags={"elector.metrics_host": "0.0.0.0"}), "elector") == 9103
