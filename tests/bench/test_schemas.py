"""What the suite of schemas counts as valid and equal, and that the product of its parts is what it says."""

from __future__ import annotations

import pytest

from bench.schemas.__main__ import judged, take
from bench.schemas.suite import Answer, Case, is_valid, load

CASES = [Case(f"x.json: {number}", 1, {"type": "integer", "maximum": 10}) for number in range(5)]


def answer(text: str, token_ids: list[int], finish_reason: str = "stop") -> Answer:
    return Answer(text, token_ids, finish_reason)


def test_what_is_cut_off_or_breaks_its_schema_or_differs_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = [answer("7", [7]) for _ in CASES]
    found = judged(CASES, expected, expected)
    assert (found["schemas"], found["valid"], found["equal"], found["tokens"]) == (5, 5, 5, 5)
    assert capsys.readouterr().err == ""
    wrong = [
        answer("7", [7], "length"),
        answer("12", [7]),
        answer('{"a', [7]),
        answer("7", [1, 2]),
        expected[4],
    ]
    struck = judged(CASES, wrong, expected)
    assert (struck["valid"], struck["equal"], struck["tokens"]) == (2, 4, 6)
    assert struck["digest"] != found["digest"]
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_numbers_are_decimals_and_formats_are_checked() -> None:
    assert is_valid("0.0039", {"multipleOf": 0.0001}) and not is_valid("0.00395", {"multipleOf": 0.0001})
    assert not is_valid('"2026-13-01"', {"format": "date"}) and is_valid('"2026-12-01"', {"format": "date"})
    assert is_valid("3", {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3})
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}
    assert not is_valid("3", old)


def test_an_answer_is_put_together_from_its_events() -> None:
    found = Answer()
    take({"choices": [{"text": "[1", "token_ids": [1, 2], "finish_reason": None}]}, found)
    take({"choices": [], "usage": {}}, found)
    take({"choices": [{"text": "]", "token_ids": [3], "finish_reason": "stop"}]}, found)
    assert found == answer("[1]", [1, 2, 3])
    take({"error": {"message": "it broke"}}, found)
    assert found == answer("[1]", [1, 2, 3], "it broke")


def test_the_suite_has_two_hundred_schemas() -> None:
    cases = load()
    assert len({case.name for case in cases}) == len(cases) >= 200
    assert len({str(case.schema) for case in cases}) == len(cases)
