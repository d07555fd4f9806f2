"""The page at `/` of a real server with the bundled model, in Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from protocol.speculation import SpeculativeConfig
from tests.chromium import Visit, open_browser
from tests.e2e.serving import HttpServing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MODEL = Path(__file__).parents[2] / "models" / "tandem-code-10m"
WORKERS = {"prefill-0": "", "decode-0": "", "decode-1": ""}
PROMPT = "def f(x):\n    return x + 1\n\n\ndef f(x):\n    return x + 1\n\n\ndef f"
NUM_TOKENS = 96


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def serving(browser: Browser) -> Iterator[HttpServing]:
    speculative = SpeculativeConfig(method="ngram")
    options = {"dtype": "bfloat16", "speculative_config": speculative, "shutdown_timeout": 0.1}
    with HttpServing(MODEL, WORKERS, **options) as serving:
        serving.router.expect(list(WORKERS))
        yield serving


@pytest.fixture
def visit(browser: Browser, serving: HttpServing) -> Iterator[Visit]:
    with Visit(browser, serving.url) as visit:
        yield visit


def events_of(visit: Visit, max_tokens: int = NUM_TOKENS) -> list[dict[str, Any]]:
    """Generate, and return what the page was sent."""
    with visit.page.expect_response("**/v1/completions") as found:
        visit.generate(PROMPT, max_tokens)
    visit.shows("#facts", f"{max_tokens} tokens in ")
    lines = found.value.text().split("\n\n")
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_completion_streams_in_and_equals_the_api(visit: Visit, serving: HttpServing) -> None:
    visit.page.evaluate(
        """() => {
            window.grown = 0;
            new MutationObserver(() => { window.grown += 1 }).observe(
                document.querySelector("#output"), { childList: true, subtree: true });
        }"""
    )
    events_of(visit, 300)
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0}
    expected = serving.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert visit.page.locator("#output .answer").text_content() == expected
    assert visit.page.locator("#output .given").text_content() == PROMPT
    assert visit.page.evaluate("window.grown") > 3


def test_accepted_drafts_are_tinted(visit: Visit) -> None:
    events = events_of(visit)
    spans = [span for event in events for choice in event["choices"] for span in choice["spans"]]
    drafted = "".join(span["text"] for span in spans if span["drafted"])
    assert drafted and drafted == "".join(visit.page.locator("#output mark").all_text_contents())
    tint, plain = (
        visit.page.locator(f"#output .answer {tag}").first.evaluate(
            "e => getComputedStyle(e).backgroundColor"
        )
        for tag in ("mark", "span")
    )
    assert tint != plain
    (choice,) = events[-1]["timing"]["choices"]
    told = f"{choice['accepted_tokens']} of {choice['drafted_tokens']} drafted tokens accepted"
    visit.shows("#facts", told)


def test_speculation_can_be_left_out(visit: Visit) -> None:
    visit.page.evaluate("document.querySelector('[name=drafts]').checked = false")
    (choice,) = events_of(visit)[-1]["timing"]["choices"]
    assert choice["drafted_tokens"] == 0
    assert visit.page.locator("#output mark").count() == 0


def test_the_stages_of_a_split_request(visit: Visit) -> None:
    timing = events_of(visit)[-1]["timing"]
    (choice,) = timing["choices"]
    assert choice["mode"] == "split" and choice["transfer"]
    rows = visit.page.locator(".stages tr")
    names = rows.locator("th").all_text_contents()
    assert names == [
        *("Router", "Queue", "Prefill", "Transfer", "Decode queue", "First token", "Decode", "Drafts")
    ]
    told = dict(zip(names, rows.locator("td:last-child").all_text_contents(), strict=True))
    for name, seconds in (
        ("Prefill", choice["prefill_s"]),
        ("First token", choice["ttft_s"]),
        ("Decode", choice["decode_s"]),
        ("Transfer", choice["transfer"]["transfer_s"]),
    ):
        value, unit = told[name].split()
        assert float(value) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=0.01)
    width = rows.locator("i.decode").evaluate("e => e.getBoundingClientRect().width")
    track = rows.locator(".track").first.evaluate("e => e.getBoundingClientRect().width")
    assert width / track == pytest.approx(choice["decode_s"] / choice["total_s"], abs=0.03)
    visit.shows("#facts", f"over {choice['transfer']['transport']}")


def test_a_chat_goes_on(visit: Visit) -> None:
    visit.page.locator("label", has_text="Chat").click()
    visit.generate("def main():", 12)
    visit.shows("#facts", "12 tokens")
    first = visit.page.locator("#output .answer").text_content()
    with visit.page.expect_request("**/v1/chat/completions") as found:
        visit.generate("more", 12)
    assert [message["content"] for message in found.value.post_data_json["messages"]] == [
        "def main():",
        first,
        "more",
    ]
    visit.shows("#facts", "12 tokens")
    assert visit.page.locator("#output article").count() == 4


def test_the_cluster_is_what_the_server_says_and_a_killed_worker_returns(
    visit: Visit, serving: HttpServing
) -> None:
    visit.shows("#health", "3 of 3 workers ready")
    events_of(visit, 8)
    names = visit.page.locator("#workers tbody th").all_text_contents()
    assert sorted(names) == sorted(worker for worker in serving.worker_states())
    assert set(visit.page.locator("#diagram text.name").all_text_contents()) == {"router", *names}
    links = serving.http.get("/cluster").json()["links"]
    for link in links:
        visit.shows(
            "#links", re.compile(f"{link['from']} → {link['to']}: {link['transport']}, .*B/s, .* moved")
        )
    assert links
    process = serving.workers["decode-1"].process
    process.kill()
    serving.bury("decode-1")
    visit.shows("#workers tr:has(th:text-is('decode-1'))", "returning")
    visit.shows("#health", "2 of 3 workers ready")
    serving.workers.pop("decode-1")
    serving.add("decode-1")
    visit.shows("#workers tr:has(th:text-is('decode-1'))", "ready")
    visit.shows("#health", "3 of 3 workers ready")


def test_placements_are_told_in_words(visit: Visit) -> None:
    events_of(visit, 8)
    newest = "#decisions li:first-child"
    visit.shows(newest, re.compile("Split: prefill-0 → decode-. for .* tokens"))
    visit.shows(
        newest, re.compile(r"Expected to cost .*s: .*decode .*s.* Its first token took .*s \(.*s expected")
    )


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, serving: HttpServing) -> None:
    with Visit(browser, serving.url, viewport={"width": 360, "height": 740}) as visit:
        visit.generate("x" * 300)
        visit.shows("#facts", "tokens in")
        visit.shows("#decisions", "Its first token took")
        visit.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 360
        assert visit.page.locator("#diagram g").last.evaluate("e => e.getBoundingClientRect().right") <= 360


def test_a_server_that_stops_in_mid_stream(visit: Visit, serving: HttpServing) -> None:
    """The last test: nothing answers any more."""
    visit.generate("def main():\n", 900)
    visit.page.wait_for_selector("#output .answer span")
    serving.router.stop()
    visit.shows("#problem", "the server is shutting down")
    assert visit.page.locator("#output .answer").text_content()
    visit.shows("#stale", "The server does not answer.")
    visit.shows("#health", "The server does not answer.")
