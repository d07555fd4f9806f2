"""The endpoint picker among the examples chooses between real servers when it is asked as Envoy asks."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.environments import python_with
from tests.e2e.serving import HttpServing
from tests.engine.adapter_files import write_adapter

ROOT = Path(__file__).parents[2]
PACKAGES = ["grpcio==1.85.3", "xds-protos==1.85.0", "httpx"]
GATEWAY = Path(__file__).with_name("clients") / "gateway.py"
ONE = {"decode-0": ""}
DESTINATION = "x-gateway-destination-endpoint"
DEAD = "127.0.0.1:9"


@contextlib.contextmanager
def running(*command: object) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([str(part) for part in command], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


class Gateway:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin and process.stdout
        self.asked, self.answers = process.stdin, process.stdout

    def ask(
        self, subset: list[str] | None = None, model: str = "model", trailers: bool = False
    ) -> list[dict[str, Any]]:
        """Return the picker's answers to one request, until it was answered or refused."""
        request = {"body": {"model": model}, "subset": subset, "trailers": trailers}
        print(json.dumps(request), file=self.asked, flush=True)
        answers: list[dict[str, Any]] = json.loads(self.answers.readline())
        return answers


def chosen(answers: list[dict[str, Any]]) -> str:
    """Return the endpoint that the header and the metadata name, or the status of a refusal."""
    first = answers[0]
    if "immediateResponse" in first:
        assert len(answers) == 1
        return str(first["immediateResponse"]["status"]["code"])
    (header,) = first["requestHeaders"]["response"]["headerMutation"]["setHeaders"]
    named = str(first["dynamicMetadata"]["envoy.lb"][DESTINATION])
    assert header["header"] == {"key": DESTINATION, "rawValue": base64.b64encode(named.encode()).decode()}
    assert header["appendAction"] == "OVERWRITE_IF_EXISTS_OR_ADD"
    return named


def bodies(answers: list[dict[str, Any]], part: str) -> list[tuple[bytes, bool]]:
    found = [answer[part]["response"]["bodyMutation"] for answer in answers if part in answer]
    chunks = [each["streamedResponse"] for each in found]
    return [(base64.b64decode(each["body"]), each.get("endOfStream", False)) for each in chunks]


@pytest.mark.timeout(900)
def test_the_least_loaded_server_is_picked_by_the_published_messages(folder: Path) -> None:
    python = python_with(PACKAGES)
    with contextlib.ExitStack() as stack:
        adapters = {"sql": str(write_adapter(folder, folder / "sql", 0))}
        servers = [
            stack.enter_context(HttpServing(folder, ONE, metric_names="vllm", **options))
            for options in ({"enable_lora": True, "lora_modules": adapters, "compile": "off"}, {})
        ]
        busy, idle = (server.url.removeprefix("http://") for server in servers)
        picker = stack.enter_context(
            running(python, ROOT / "examples" / "endpoint_picker.py", "127.0.0.1:0", busy, idle, DEAD)
        )
        assert picker.stdout
        port = picker.stdout.readline().split()[-1]
        gateway = Gateway(stack.enter_context(running(python, GATEWAY, port)))
        servers[0].wait(lambda: {chosen(gateway.ask()) for _ in range(8)} == {busy, idle})

        answering, enough = threading.Event(), threading.Event()
        body = {"prompt": [5, 6], "max_tokens": 400, "n": 8, "ignore_eos": True, "stream": True}

        def load() -> None:
            while not enough.is_set():
                with servers[0].http.stream("POST", "/v1/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        answering.set()

        sender = threading.Thread(target=load, daemon=True)
        sender.start()
        assert answering.wait(60)
        servers[0].wait(lambda: chosen(gateway.ask()) == chosen(gateway.ask()) == idle)
        assert chosen(gateway.ask(model="sql")) == busy, "where the adapter is"
        enough.set()
        for end in ([], ["Trailers"]):
            answers = gateway.ask(trailers=bool(end))
            parts = [f"request{part}" for part in ("Headers", "Body", "Body", *end)]
            parts += [f"response{part}" for part in ("Headers", "Body", *end)]
            assert [next(iter(answer)) for answer in answers] == parts
            asked = bodies(answers, "requestBody")
            assert (b"".join(part for part, _ in asked), asked[-1][1]) == (b'{"model": "model"}', not end)
            assert bodies(answers, "responseBody") == [(b"answer", not end)]
        assert chosen(gateway.ask([busy])) == busy
        nowhere: list[list[str]] = [[], [DEAD]]
        assert {chosen(gateway.ask(subset)) for subset in nowhere} == {"ServiceUnavailable"}
        sender.join(60)
