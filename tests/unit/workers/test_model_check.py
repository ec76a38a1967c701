"""A model that cannot be there is refused before vLLM is imported; what only vLLM can tell passes."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.model_files import check_hub_model, check_model_path, hub_folder

ANSWERS = {
    "/api/models/org/open": (200, {}),
    "/api/models/org/gated": (200, {"gated": "manual"}),
    "/api/models/org/broken": (500, {}),
}


class Hub:
    """A model hub on this machine, and the tokens that it was asked with."""

    def __init__(self) -> None:
        self.tokens: list[str | None] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.tokens.append(self.headers["Authorization"])
                code, body = ANSWERS.get(self.path, (401, {}))
                content = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_args: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = Hub()
    serving = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    yield found
    found.server.shutdown()
    serving.join()
    found.server.server_close()


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./nope", "there is no folder"),
        ("/nowhere/model", "there is no folder /nowhere/model"),
        ("models/of/mine", "this is no Hugging Face id"),
        ("-x", "this is no Hugging Face id"),
        ("Qwen/Qwen 3", "this is no Hugging Face id"),
        ("empty", "holds no model: it has no config.json"),
    ],
)
def test_a_path_without_a_model_is_named(tmp_path: Path, model: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineStartFailed) as refused:
        check_model_path(model)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "model", ["there", "./there", "weights.gguf", "gpt2", "Qwen/Qwen3-0.6B", "org/x-GGUF:Q4_K_M", "s3://b/m"]
)
def test_folders_files_ids_and_addresses_pass(tmp_path: Path, model: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    (tmp_path / "weights.gguf").write_text("")
    check_model_path(model)


def environment(tmp_path: Path, hub: Hub | None = None, **more: str) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9", **more}


def test_the_hub_is_asked_and_what_it_has_passes(hub: Hub, tmp_path: Path) -> None:
    check_hub_model("org/open", {}, environment(tmp_path, hub))
    check_hub_model("org/open:Q4_K_M", {}, environment(tmp_path, hub))
    assert hub.tokens == [None, None]


def test_a_model_that_the_hub_does_not_have_is_refused(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match=r"has no such model, or it is private, and HF_TOKEN is needed"):
        check_hub_model("org/nope", {}, environment(tmp_path, hub))
    with pytest.raises(EngineStartFailed, match="the token given does not open it"):
        check_hub_model("org/nope", {}, environment(tmp_path, hub, HF_TOKEN="t"))
    assert hub.tokens == [None, "Bearer t"]


def test_a_gated_model_needs_a_token_which_may_lie_in_its_file(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match=f"gated: accept its terms at {hub.url}/org/gated, and give HF_TOKEN"):
        check_hub_model("org/gated", {}, environment(tmp_path, hub))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("t\n")
    check_hub_model("org/gated", {}, environment(tmp_path, hub))
    assert hub.tokens[-1] == "Bearer t"


def test_a_hub_that_fails_leaves_the_question_to_vllm(hub: Hub, tmp_path: Path) -> None:
    check_hub_model("org/broken", {}, environment(tmp_path, hub))
    assert len(hub.tokens) == 1


def test_a_hub_out_of_reach_is_said_with_the_place_where_the_model_is_not(tmp_path: Path) -> None:
    with pytest.raises(
        EngineStartFailed, match=rf"not in the cache {tmp_path}/hf/hub, and http://127\.0\.0\.1:9 cannot be reached"
    ):
        check_hub_model("org/open", {}, environment(tmp_path, no_proxy="*"))


def test_offline_only_the_cache_counts(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match=r"not in the cache .*HF_HUB_OFFLINE is set"):
        check_hub_model("org/open", {}, environment(tmp_path, HF_HUB_OFFLINE="1"))


@pytest.mark.parametrize("where", ["hub", "download_dir"])
def test_what_is_in_a_cache_is_not_asked_for(hub: Hub, tmp_path: Path, where: str) -> None:
    cache = tmp_path / ("hf/hub" if where == "hub" else "mine")
    folder = cache / "models--org--nope" / "snapshots" / "1f"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    check_hub_model("org/nope", {} if where == "hub" else {"download_dir": str(cache)}, environment(tmp_path, hub))
    assert hub.tokens == []


def test_the_folder_of_an_id_is_the_hubs(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert hub_folder("org/m", {}, {"HF_HUB_CACHE": "/c"}) == Path("/c/models--org--m")
    assert hub_folder("org/m:Q4", {"download_dir": "/d"}, {}) == Path("/d/models--org--m")
    assert hub_folder("mine", {}, {}) is None
    assert hub_folder("s3://b/m", {}, {}) is None


def test_folders_and_other_hubs_are_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    check_hub_model("mine", {}, environment(tmp_path, hub))
    check_hub_model("s3://bucket/model", {}, environment(tmp_path, hub))
    check_hub_model("org/nope", {}, environment(tmp_path, hub, VLLM_USE_MODELSCOPE="True"))
    assert hub.tokens == []
