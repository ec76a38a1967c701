"""The compose file is valid by Compose's own schema, and each of its command lines is one that Headrace understands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.command_lines import drain_s, is_known, read

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "compose"
SCHEMA = jsonschema.Draft7Validator(json.loads((Path(__file__).parent / "schemas" / "compose-spec.json").read_text()))
TEXT = (FOLDER / "compose.yaml").read_text()
COMPOSE: Any = yaml.safe_load(TEXT)
SERVICES: dict[str, Any] = COMPOSE["services"]
PARTS = [name for name in SERVICES if name != "nats"]
CHECKED = [name for name, service in SERVICES.items() if "healthcheck" in service]
CONFIGURATIONS = [FOLDER / "nats-server.conf", ROOT / "deploy" / "systemd" / "nats-server.conf"]
GIVEN = {"HEADRACE_API_KEY": "of-the-test", "HEADRACE_TAG": "1"}


def filled(value: str) -> str:
    """Fill in variables as Compose does."""
    return re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda match: GIVEN.get(match[1]) or match[2], value)


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_the_file_is_valid_and_an_unknown_key_is_not() -> None:
    SCHEMA.validate(COMPOSE)
    wrong = {**COMPOSE, "services": {"nats": {**SERVICES["nats"], "restarts": "no"}}}
    with pytest.raises(jsonschema.ValidationError):
        SCHEMA.validate(wrong)


@pytest.mark.parametrize("name", PARTS)
def test_each_command_line_is_understood_and_its_part_may_drain(name: str) -> None:
    service = SERVICES[name]
    words = [filled(word) for word in service["command"]]
    environment = service.get("environment") or {}
    environ = {key: filled(value) for key, value in environment.items()} if isinstance(environment, dict) else {}
    settings = read(words, environ)
    assert seconds(service["stop_grace_period"]) >= drain_s(settings, words[0]) + 5


def test_a_wrong_command_line_fails() -> None:
    with pytest.raises(SystemExit):
        read([*SERVICES["router"]["command"], "--windows", "3"])
    assert not is_known("rooter")


@pytest.mark.parametrize("name", SERVICES)
def test_containers_have_no_rights_and_write_to_their_volumes_only(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["init"] is False
    assert {volume.partition(":")[0] for volume in service["volumes"]} <= COMPOSE["volumes"].keys()
    assert (ROOT / "deploy" / "compose" / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_the_broker_is_reached_from_inside_only_and_published_ports_are_on_loopback() -> None:
    assert COMPOSE["networks"]["broker"]["internal"] is True
    assert SERVICES["nats"]["networks"] == ["broker"]
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_no_secret_is_in_the_file_and_the_key_must_be_given() -> None:
    assert SERVICES["frontend"]["environment"]["HEADRACE_API_KEY"].startswith("${HEADRACE_API_KEY:?")
    names = set(re.findall(r"\$\{(\w+)", TEXT))
    example = (FOLDER / "example.env").read_text()
    assert names <= set(re.findall(r"(?m)^(\w+)=", example))
    assert re.search(r"(?m)^HEADRACE_API_KEY=$", example)
    ignored = subprocess.run(["git", "check-ignore", "deploy/compose/.env"], cwd=ROOT, capture_output=True, check=False)
    assert ignored.returncode == 0


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=str)
def test_nats_server_takes_its_configuration_with_room_for_streams_in_memory(config: Path) -> None:
    program = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    assert program is not None
    done = subprocess.run([program, "-t", "-c", str(config)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"max_memory_store: [1-9]", config.read_text())


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=str)
def test_what_is_confirmed_is_on_the_disk(config: Path) -> None:
    assert "  sync_interval: always" in config.read_text().splitlines()


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=str)
def test_a_client_that_takes_nothing_does_not_hold_up_the_server_for_long(config: Path) -> None:
    assert "write_deadline: 1s" in config.read_text().splitlines()


class Health(BaseHTTPRequestHandler):
    """A page that says how a part is: 200 below /well, 503 below /ill."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path.startswith("/well/") else 503)
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    """The address of a page of health."""
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", CHECKED)
def test_a_health_check_tells_well_from_ill_and_has_no_word_with_spaces(name: str, page: str) -> None:
    """Podman 4.3 cuts the words that Compose sends it at spaces: nats-server was never healthy, and no part started."""
    way, program, *words = SERVICES[name]["healthcheck"]["test"]
    assert (way, program) == ("CMD", "python")
    assert [word for word in words if re.search(r"\s", word)] == []

    def code(state: str) -> int:
        there = [re.sub(r"http://127\.0\.0\.1:\d+", f"{page}/{state}", word) for word in words]
        assert there != words
        return subprocess.run([sys.executable, *there], capture_output=True, check=False).returncode

    assert code("well") == 0
    assert code("ill") != 0
