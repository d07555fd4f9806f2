"""The page at `/` of a real server with the bundled model, in Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from protocol.speculation import SpeculativeConfig
from tests.chromium import Visit, need_browser, open_browser
from tests.e2e.serving import HttpServing

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

need_browser()

MODEL = Path(__file__).parents[2] / "models" / "tandem-code-10m"
WORKERS = {"prefill-0": "", "decode-0": ""}
PROMPT = "def f(x):\n    return x + 1\n\n\ndef f(x):\n    return x + 1\n\n\ndef f"
NUM_TOKENS = 300
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def serving(browser: BrowserContext, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServing]:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    options = {"dtype": "bfloat16", "speculative_config": speculative, "shutdown_timeout": 0.1}
    options["chat_template"] = str(template)
    with HttpServing(MODEL, WORKERS, **options) as serving:
        serving.router.expect({name: name.partition("-")[0] for name in WORKERS})
        yield serving


@pytest.fixture
def visit(browser: BrowserContext, serving: HttpServing) -> Iterator[Visit]:
    with Visit(browser, serving.url) as visit:
        yield visit


class Answered(NamedTuple):
    """A visit with an answer, and the events that the page received for it."""

    visit: Visit
    events: list[dict[str, Any]]
    num_changes: int

    @property
    def timing(self) -> dict[str, Any]:
        (choice,) = self.events[-1]["timing"]["choices"]
        return choice


@pytest.fixture(scope="module")
def answered(browser: BrowserContext, serving: HttpServing) -> Iterator[Answered]:
    with Visit(browser, serving.url, own_tab=True) as visit:
        visit.page.evaluate(
            """() => {
                window.changes = 0;
                new MutationObserver(() => { window.changes += 1 })
                    .observe(document.querySelector("#output"), { childList: true, subtree: true });
            }"""
        )
        events = events_of(visit, NUM_TOKENS)
        yield Answered(visit, events, visit.page.evaluate("window.changes"))


@pytest.mark.parametrize("sample", ["long", "edit", "schema"])
def test_the_bundled_model_answers_each_sample(visit: Visit, sample: str) -> None:
    visit.page.click(f"[data-sample={sample}]")
    visit.shows("#facts", " tokens in ")
    assert visit.page.locator("#problem").is_hidden()


def events_of(visit: Visit, max_tokens: int) -> list[dict[str, Any]]:
    """Generate an answer, and return the events that the page received."""
    with visit.page.expect_response("**/v1/completions") as found:
        visit.generate(PROMPT, max_tokens)
    visit.shows("#facts", f"{max_tokens} tokens in ")
    lines = found.value.text().split("\n\n")
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_completion_streams_in_and_equals_the_api(answered: Answered, serving: HttpServing) -> None:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    expected = serving.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert answered.visit.page.locator("#output .answer").text_content() == expected
    assert answered.visit.page.locator("#output .given").text_content() == PROMPT
    assert answered.num_changes > 3


def test_accepted_drafts_are_tinted(answered: Answered) -> None:
    page = answered.visit.page
    spans = [span for event in answered.events for choice in event["choices"] for span in choice["spans"]]
    drafted = "".join(span["text"] for span in spans if span["drafted"])
    assert drafted and drafted == "".join(page.locator("#output mark").all_text_contents())
    color = "element => getComputedStyle(element).backgroundColor"
    tint, plain = (page.locator(f"#output .answer {tag}").first.evaluate(color) for tag in ("mark", "span"))
    assert tint != plain
    accepted, drafted = answered.timing["accepted_tokens"], answered.timing["drafted_tokens"]
    answered.visit.shows("#facts", f"{accepted} of {drafted} drafted tokens accepted")


def test_the_stages_of_a_split_request(answered: Answered) -> None:
    choice = answered.timing
    assert choice["mode"] == "split" and choice["transfer"]
    rows = answered.visit.page.locator(".stages tr")
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
    answered.visit.shows("#facts", f"over {choice['transfer']['transport']}")


def test_placements_are_explained_in_words(answered: Answered) -> None:
    newest = "#decisions li:first-child"
    answered.visit.shows(newest, re.compile("Split: prefill-0 → decode-0 for .* tokens"))
    reckoning = r"Expected to cost .*s: .*decode .*s.* Its first token took .*s \(.*s expected"
    answered.visit.shows(newest, re.compile(reckoning))


def test_speculation_can_be_turned_off(visit: Visit) -> None:
    visit.page.evaluate("document.querySelector('[name=drafts]').checked = false")
    (choice,) = events_of(visit, 60)[-1]["timing"]["choices"]
    assert choice["drafted_tokens"] == 0
    assert visit.page.locator("#output mark").count() == 0


def test_a_chat_has_a_second_turn(visit: Visit) -> None:
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


def test_the_cluster_view_equals_the_servers_state_and_a_killed_worker_returns(
    visit: Visit, serving: HttpServing
) -> None:
    visit.shows("#health", "2 of 2 workers ready")
    names = visit.page.locator("#workers tbody th").all_text_contents()
    assert sorted(names) == sorted(serving.worker_states())
    assert visit.page.locator("#diagram text.name").all_text_contents() == ["router", *names]
    events_of(visit, 8)
    (link,) = serving.http.get("/cluster").json()["links"]
    pair = f"prefill-0 → decode-0: {link['transport']}"
    visit.shows("#links", re.compile(f"{pair}, .*B/s, .* moved"))
    serving.workers["decode-0"].process.kill()
    serving.bury("decode-0")
    visit.shows("#workers tr:has(th:text-is('decode-0'))", "returning")
    visit.shows("#health", "1 of 2 workers ready")
    serving.workers.pop("decode-0")
    serving.add("decode-0")
    visit.shows("#workers tr:has(th:text-is('decode-0'))", "ready")
    visit.shows("#health", "2 of 2 workers ready")


def test_a_phone_needs_no_sideways_scrolling(browser: BrowserContext, serving: HttpServing) -> None:
    with Visit(browser, serving.url, width=360, height=740) as visit:
        visit.generate("x" * 300)
        visit.shows("#facts", "tokens in")
        visit.shows("#decisions", "Its first token took")
        visit.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 360
        assert visit.page.locator("#diagram g").last.evaluate("e => e.getBoundingClientRect().right") <= 360


def test_a_server_that_stops_during_a_stream(visit: Visit, serving: HttpServing) -> None:
    """The last test: the server is gone afterwards."""

    def stop_soon() -> None:
        """Stop the router after some tokens, even if the browser has not shown any yet."""
        journal = serving.router.state.journal
        serving.wait(lambda: any(len(request.output_token_ids) > 20 for request in journal))
        serving.router.stop()

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(stop_soon)
        visit.generate("def main():\n", 900)
        stopped.result()
    visit.shows("#problem", "the server is shutting down")
    assert visit.page.locator("#output .answer").text_content()
    visit.shows("#stale", "The server does not answer.")
    visit.shows("#health", "The server does not answer.")
