"""The hub is asked once for a model that is no folder here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from deploy.hub import check_source
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.text.tokenizer import Tokenizer


class Hub(HTTPServer):
    """Answers each request with the same status and counts them."""

    status, error = 200, ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("Content-Length", "2")
        if self.server.error:
            self.send_header("X-Error-Code", self.server.error)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        url = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", url, raising=False)
        yield server
        server.shutdown()
        thread.join()


def test_a_model_of_the_hub(hub: Hub) -> None:
    check_source("me/model", "--model", "v1")
    assert hub.asked == ["/me/model/resolve/v1/config.json"]


@pytest.mark.parametrize("error", ["RepoNotFound", "EntryNotFound", "RevisionNotFound"])
def test_a_model_that_the_hub_does_not_have(hub: Hub, error: str) -> None:
    hub.status, hub.error = 404, error
    with pytest.raises(
        ConfigError, match="--model: 'me/model' is no folder here, and the hub does not give its"
    ):
        check_source("me/model", "--model")
    assert len(hub.asked) == 1


@pytest.mark.parametrize("status", [503, 504])
def test_a_hub_that_does_not_serve_is_asked_once(hub: Hub, status: int) -> None:
    hub.status = status
    with pytest.raises(ConfigError, match=r"--tokenizer: 'me/model' is no folder here, .* cannot be reached"):
        check_source("me/model", "--tokenizer")
    assert len(hub.asked) == 1
    assert not constants.HF_HUB_OFFLINE


def test_without_a_hub_the_cache_is_taken_and_the_hub_not_asked_again(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = tmp_path / "cache" / "models--me--model" / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("1" * 40)
    hub.status = 503
    for _ in range(2):
        check_source("me/model", "--model")
    assert len(hub.asked) == 1
    assert caplog.text.count("models are taken from the cache") == 1
    with pytest.raises(ConfigError, match="--model: 'me/other' is no folder here, it is not in the cache"):
        check_source("me/other", "--model")
    with pytest.raises(ConfigError, match="--model: me/model has no usable tokenizer"):
        Tokenizer.load(ServeConfig(model="me/model"))
    assert len(hub.asked) == 1
