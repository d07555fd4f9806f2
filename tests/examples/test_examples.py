"""Each example runs against one server, which uses the example's placement policy and drafter.

The endpoint picker runs in `tests/e2e/test_endpoint_picker.py`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.server_process import ANSWER_S, ROOT, ServerProcess, write_served

DRAFTER = "examples.custom_drafter:LastFollower"
SPECULATIVE = {"method": "custom", "drafter": DRAFTER, "num_speculative_tokens": 3}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("examples")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    options = ["--decode-replicas", "2", "--placement", "examples.custom_policy:long_apart"]
    options += ["--speculative-config", json.dumps(SPECULATIVE), "--chat-template", str(template)]
    running = ServerProcess(write_served(folder), folder / "log", "--no-disaggregation", *options)
    try:
        yield running.wait_ready()
    finally:
        running.kill()


def run(name: str, *arguments: str, given: str = "") -> str:
    """Run an example in this process, which has imported its libraries already, and return its output."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", [name, *arguments])
        patch.setattr(sys, "stdin", io.StringIO(given))
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return output.getvalue()


def test_each_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    names = {file.stem for file in (ROOT / "examples").glob("*.py")} - {"__init__"}
    assert {name for name in names if f"{name}.py" not in text and f"examples.{name}:" not in text} == set()


def test_python_client(server: ServerProcess) -> None:
    assert run("python_client.py", server.url).strip()


def test_structured_output(server: ServerProcess) -> None:
    book = ast.literal_eval(run("structured_output.py", server.url))
    assert set(book) == {"title", "year", "genre"} and 1900 <= book["year"] <= 2100


def test_chat(server: ServerProcess) -> None:
    assert len(run("chat.py", server.url, given="one\n").strip()) > 0


def test_batch(server: ServerProcess, tmp_path: Path) -> None:
    prompts = [{"prompt": [5 + place, 6, 7], "max_tokens": 3 + place % 4} for place in range(40)]
    (tmp_path / "prompts").write_text("\n".join(map(json.dumps, prompts)))
    assert "40 answers" in run("batch.py", str(tmp_path / "prompts"), str(tmp_path / "answers"), server.url)
    answers = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    pairs = zip(answers, prompts, strict=True)
    assert all(answer["completion_tokens"] <= prompt["max_tokens"] for answer, prompt in pairs)


def complete(server: ServerProcess, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 32, "return_token_ids": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_custom_policy(server: ServerProcess) -> None:
    """The cost policy would alternate between idle workers."""
    for length in (8, 8, 200, 8, 200):
        complete(server, [5, 6] * (length // 2), max_tokens=1)
    decisions = httpx.get(f"{server.url}/decisions?limit=5", timeout=ANSWER_S).json()["decisions"]
    names = [decision["chosen"]["workers"]["decode"] for decision in reversed(decisions)]
    assert names == [f"decode-{place}" for place in (0, 0, 1, 0, 1)]


def test_custom_drafter(server: ServerProcess) -> None:
    """The text repeats itself, since only some tokens are allowed."""
    asked = {"return_timing": True, "temperature": 0, "allowed_token_ids": [5, 6, 7], "ignore_eos": True}
    drafted = complete(server, [5, 6, 7], **asked)
    plain = complete(server, [5, 6, 7], **asked, speculative={"enabled": False})
    assert drafted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    choices = [answer["timing"]["choices"][0] for answer in (drafted, plain)]
    assert choices[0]["accepted_tokens"] > 0 == choices[1]["accepted_tokens"]


def test_a_killed_launcher_takes_its_workers_along(server: ServerProcess) -> None:
    """The last test of this module: the server ends here."""
    server.end_without_launcher()
