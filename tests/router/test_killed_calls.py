"""Workers die in the middle of calls of each form; the calls are those of an undisturbed answer."""

from __future__ import annotations

import json

import pytest

from tests.router.parsing.test_parsing import CALLS, FORMS, SCHEMAS, written
from tests.router.router_clients import emitted, eventually, is_idle, lose
from tests.router.scripted import Scripted

TEMPLATE = "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}
    for name, schema in SCHEMAS.items()
]
WHERE = (0.3, 0.5, 0.7, 0.95)
"""Shares of the answer after which a worker dies."""


def found(told: tuple[dict, str]) -> tuple[str, list[tuple[str, str]], str]:
    """Return an answer's content, calls and finish reason."""
    message, finish_reason = told
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message["tool_calls"]]
    return message.get("content") or "", calls, finish_reason


def dies_at(scripted: Scripted, pool, share: float, says: str, stream: bool) -> tuple[dict, str]:
    """Ask, with the worker killed at this share of the answer. Another one continues."""
    scripted.says = says
    scripted.worker.stall_after = int(len(scripted.tokens()) * share)
    asked = pool.submit(scripted.message, says, stream, tools=TOOLS)
    eventually(lambda: any(each >= scripted.worker.stall_after for each in emitted(scripted.router)))
    killed, number = scripted.worker, int(scripted.worker.worker_id.partition("-")[2])
    scripted.worker = scripted.add_worker(f"decode-{number + 1}")
    lose(scripted.router, killed)
    told = asked.result(20)
    (again,) = scripted.worker.generated
    assert killed.stall_after <= len(again.output_token_ids) < len(scripted.tokens())
    return told


@pytest.mark.parametrize("key", FORMS)
def test_a_call_goes_on_where_its_worker_died(make_scripted, pool, key):
    name, form = FORMS[key]
    says, content, calls = written(form)
    scripted = make_scripted("model", TEMPLATE, tool_call_parser=name)
    expected = content, [(each, json.loads(arguments)) for each, arguments in calls], "tool_calls"
    assert calls == CALLS[: len(calls)]
    for number, share in enumerate(WHERE):
        told, called, finish_reason = found(dies_at(scripted, pool, share, says, stream=number % 2 == 0))
        read = [(each, json.loads(arguments)) for each, arguments in called]
        assert (told, read, finish_reason) == expected, share
    assert scripted.router.metric("tandem_requests_placed_again_total", reason="worker_lost") == len(WHERE)
    eventually(lambda: is_idle(scripted.router))
