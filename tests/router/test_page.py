"""The page at `/` in Chromium with problems: keys, refusals, broken streams, hostile text."""

from __future__ import annotations

import re

import pytest

from protocol.speculation import SpeculativeConfig
from tests.chromium import Visit, need_browser, open_browser
from tests.router.router_clients import eventually, make_pair, post

need_browser()

HOSTILE = """<img src=x onerror="window.hacked = 1"><script>window.hacked = 2</script>&lt;b&gt;"""
LEAST_CONTRAST = {"ink": 7, "quiet": 4.5, "error": 4.5, "prefill": 3, "transfer": 3, "decode": 3, "drafts": 3}


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser):
    """Yield a function that opens visits, which end with the test."""
    visits = []

    def visit(router, **options) -> Visit:
        visits.append(Visit(browser, router.url, **options).__enter__())
        return visits[-1]

    yield visit
    for each in visits:
        each.__exit__(None, None, None)


def test_the_page_asks_for_the_key_and_keeps_it_in_the_tab(make_router, open_page):
    router = make_router(api_key="secret")
    router.add_worker()
    visit = open_page(router)
    page = visit.page
    visit.shows("#stale", "The server asks for an API key.")
    assert page.evaluate("document.activeElement.id") == "key-text"
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    visit.shows("#stale", "The server refused the API key.")
    page.fill("#key-text", "secret")
    page.keyboard.press("Enter")
    visit.shows("#health", "1 of 1 workers ready")
    assert page.locator("#stale").is_hidden() and page.locator("#key").is_hidden()
    visit.generate("the quick brown fox", 8)
    visit.shows("#facts", "8 tokens in")
    stored = page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie]")
    assert stored == [{"tandem.key": "secret"}, {}, ""]
    assert not any("secret" in address for address in visit.asked)
    page.click("#key-open")
    page.click("#key-forget")
    visit.shows("#stale", "The server asks for an API key.")
    assert page.evaluate("sessionStorage.length") == 0
    visit.generate("the quick brown fox", 8)
    visit.shows("#problem", "The server asks for an API key.")


def test_refusals_show_the_servers_message(make_router, open_page, pool):
    router = make_router(max_queued_requests=1)
    worker = router.add_worker(stall_after=1000)
    visit = open_page(router)
    visit.page.evaluate("document.querySelector('#ask details').open = true")
    said = post(router, temperature=-3).json()["error"]["message"]
    assert "temperature" in said
    for name, text, mended, problem in (
        ("temperature", "-3", "0", f"{said} (400)"),
        ("schema", '{"type": ', "", "The JSON schema is not JSON"),
        ("schema", '{"type": "nothing"}', "", re.compile(r"response_format.*\(400\)")),
    ):
        visit.page.fill(f"[name={name}]", text)
        visit.generate("the quick brown fox", 8)
        visit.shows("#problem", problem)
        assert visit.page.locator("#output article").count() == 0
        visit.page.fill(f"[name={name}]", mended)
    visit.generate("the quick brown fox", 8)
    visit.shows("#facts", "8 tokens in")
    assert visit.page.locator("#problem").is_hidden()
    worker.stall_after = 3
    held = pool.submit(post, router)
    eventually(lambda: len(worker.generated) == 2)
    visit.generate("the quick brown fox", 8)
    visit.shows("#problem", re.compile(r"--max-queued-requests=1 .*\(429\) Try again in 1 s\."))
    worker.stall_after = 1000
    assert held.result(20).status_code == 200


def test_an_answer_comes_and_is_stopped(make_router, open_page):
    """A waiting stage is shown until text is there. The legend appears with the first tint."""
    router = make_router(speculative_config=SpeculativeConfig(method="ngram"))
    worker = router.add_worker(stall_after=0)
    visit = open_page(router)
    legend = visit.page.locator("#legend")
    visit.generate("the quick brown fox", 20)
    visit.shows("#facts", "Waiting for the first token …")
    worker.stall_after = 4
    visit.page.wait_for_selector("#output .answer span")
    visit.shows("#facts", "The answer is being written …")
    assert legend.is_hidden()
    worker.stall_after = 1000
    visit.shows("#facts", "20 tokens in")
    assert legend.is_hidden()
    worker.tokens_per_step, worker.rejected_per_step = 4, 1
    visit.generate("the quick brown fox", 20)
    visit.shows("#facts", "drafted tokens accepted")
    visit.shows("#legend", "Tinted text was drafted")
    assert legend.is_visible()
    visit.page.click("#clear")
    assert legend.is_hidden()
    worker.stall_after = 4
    visit.generate("the quick brown fox", 50)
    visit.page.wait_for_selector("#output .answer span")
    visit.page.click("#stop")
    visit.shows("#facts", "Stopped.")
    eventually(lambda: worker.aborted)
    assert visit.page.locator("#problem").is_hidden()
    assert visit.page.evaluate("document.activeElement.id") == "go"


def test_a_chat_goes_on_after_a_stopped_answer(make_router, open_page):
    """With the text that is shown, and with the message that was typed meanwhile."""
    router = make_router()
    worker = router.add_worker(stall_after=4)
    visit = open_page(router)
    visit.page.locator("label", has_text="Chat").click()
    visit.generate("the quick", 50)
    visit.page.wait_for_selector("#output .answer span")
    visit.page.fill("#prompt", "brown fox")
    visit.page.click("#stop")
    visit.shows("#facts", "Stopped.")
    assert visit.page.input_value("#prompt") == "brown fox"
    shown = visit.page.locator("#output .answer").text_content()
    worker.stall_after = 1000
    with visit.page.expect_request("**/v1/chat/completions") as found:
        visit.page.click("#go")
    told = [message["content"] for message in found.value.post_data_json["messages"]]
    assert shown and told == ["the quick", shown, "brown fox"]
    visit.shows("#facts", "50 tokens in")
    assert visit.page.input_value("#prompt") == ""


def test_a_stream_that_breaks_in_the_middle(make_router, open_page):
    router = make_router()
    worker = router.add_worker(stall_after=4)
    visit = open_page(router)
    visit.generate("the quick brown fox", 50)
    visit.page.wait_for_selector("#output .answer span")
    server = router.server

    def break_all() -> None:
        for connection in list(server._server.server_state.connections):
            connection.transport.abort()

    server._loop.call_soon_threadsafe(break_all)
    visit.shows("#problem", "The connection broke before the answer was complete.")
    assert visit.page.locator("#output .answer").text_content()
    visit.generate("the quick brown fox", 50)
    visit.page.wait_for_selector("#output .answer span")
    assert visit.page.locator("#problem").is_hidden()
    router.kill(worker)
    server.mark_dead(worker.worker_id, worker.incarnation, "it was killed")
    visit.shows("#problem", "worker decode-0 was lost")
    visit.shows("#workers", "gone")
    visit.generate("the quick brown fox", 50)
    visit.shows("#problem", re.compile(r"no worker .*\(503\)"))
    assert visit.page.locator("#output article").count() == 0
    router.add_worker("decode-1")
    visit.generate("the quick brown fox", 5)
    visit.shows("#facts", "5 tokens in")


def test_outside_text_never_becomes_markup(make_router, open_page):
    name = '<img src=x onerror="window.hacked=3">'
    router = make_router(served_model_name=HOSTILE, placement="cost")
    for number in range(2):
        worker_id = f"{name}-{number}"
        router.add_worker(worker_id, tokens_per_step=4, rejected_per_step=1, max_model_len=2000)
    visit = open_page(router)
    visit.shows("header", HOSTILE)
    visit.generate(HOSTILE, 300)
    visit.shows("#facts", "300 tokens in")
    assert HOSTILE in visit.page.locator("#output .answer").text_content()
    visit.shows("#workers", name)
    visit.shows("#decisions", re.compile(rf"Whole: {name}-\d .* Whole: {name}-\d would cost"))
    visit.page.click("#decisions summary")
    visit.has("#decisions tbody tr", 2)
    visit.page.locator("label", has_text="Chat").click()
    visit.generate(HOSTILE, 300)
    visit.shows("#facts", "300 tokens in")
    assert visit.page.locator("img, main script, #output b").count() == 0
    assert visit.page.evaluate("window.hacked") is None


def test_everything_works_by_keyboard(router, open_page):
    visit = open_page(router)
    page = visit.page
    order, named = [], "(({ id, name, textContent }) => id || name || textContent)(document.activeElement)"
    for _ in range(11):
        page.keyboard.press("Tab")
        order.append(page.evaluate(named))
    assert order == [
        *("key-open", "API docs", "kind", "A long prompt", "An edit", "A JSON schema", "prompt"),
        *("Parameters", "go", "clear", "output"),
    ]
    page.focus("#prompt")
    page.keyboard.press("Control+a")
    page.keyboard.type("the quick brown fox")
    page.keyboard.press("Control+Enter")
    visit.shows("#facts", "tokens in")
    page.focus("[name=kind]")
    page.keyboard.press("ArrowRight")
    visit.shows("#prompt-label", "Your message")
    outline = page.evaluate(
        "getComputedStyle(document.querySelector('.switch :checked + span')).outlineStyle"
    )
    assert outline == "solid"
    for control in page.locator("input, textarea").all():
        assert control.evaluate("e => e.labels.length || e.ariaLabel"), control


def test_the_documentation_needs_no_sideways_scrolling(router, browser):
    page = browser.pages[0]
    page.goto(f"{router.url}/docs")
    for width in (1300, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_samples(make_router, open_page):
    router = make_router(placement="cost")
    make_pair(router, max_model_len=4000)
    visit = open_page(router, width=1300, height=800)
    sent = {}
    for name in ("long", "edit", "schema", "long"):
        with visit.page.expect_request("**/v1/completions") as found:
            visit.page.click(f"[data-sample={name}]")
        body = found.value.post_data_json
        visit.shows("#facts", " tokens in ")
        assert visit.page.locator("#about").is_visible() and visit.page.locator("#problem").is_hidden()
        assert visit.page.locator("#output .given").text_content() == body["prompt"]
        sent.setdefault(name, []).append(body)
    first, second = sent["long"]
    assert first["prompt"] == second["prompt"] and first["cache_salt"] != second["cache_salt"]
    assert first["disaggregate"] is True and len(first["prompt"]) > 2000
    visit.shows("#decisions li:first-child", re.compile("Split: prefill-0 → decode-0 .* It asks to be split"))
    (edit,), (schema,) = sent["edit"], sent["schema"]
    assert "disaggregate" not in edit and "response_format" not in edit
    form = schema["response_format"]
    assert form["type"] == "json_schema" and form["json_schema"]["schema"]["required"]
    visit.generate("the quick brown fox", 8)
    visit.shows("#facts", "8 tokens in")
    assert visit.page.locator("#about").is_hidden()


def test_only_supported_choices_are_offered(make_router, tmp_path, fast_tokenizer, open_page):
    """Chat needs a chat template, and splitting needs prefill workers."""
    fast_tokenizer.save(str(tmp_path / "tokenizer.json"))
    router = make_router(model=str(tmp_path), disaggregation=False)
    router.add_worker()
    visit = open_page(router)
    assert visit.page.locator("[name=kind], [data-sample=long]").count() == 0
    visit.page.click("[data-sample=edit]")
    visit.shows("#facts", " tokens in ")


def test_new_placements_are_animated_unless_motion_is_unwanted(make_router, open_page):
    router = make_router()
    make_pair(router)
    assert post(router).status_code == 200
    visit = open_page(router)
    visit.shows("#decisions", "Split: prefill-0 → decode-0")
    visit.page.evaluate(
        """() => {
            window.dots = 0;
            const diagram = document.querySelector("#diagram");
            const dots = () => diagram.querySelectorAll("circle").length;
            new MutationObserver(() => { window.dots = Math.max(window.dots, dots()) })
                .observe(diagram, { childList: true, subtree: true });
        }"""
    )
    assert post(router).status_code == 200
    visit.has("#decisions li", 2)
    assert visit.page.evaluate("window.dots") == 0
    visit.page.emulate_media(reduced_motion="no-preference")
    assert post(router).status_code == 200
    visit.has("#decisions li", 3)
    assert visit.page.evaluate("window.dots") == 1


def test_a_draft_worker_is_shown_beside_its_targets(make_router, open_page, pool):
    drafts = SpeculativeConfig(method="draft_model")
    router = make_router(draft_replicas=1, speculative_config=drafts, draft_placement="remote")
    counters = {"drafted_tokens_total": 200.0, "drafted_tokens_wrong_total": 50.0, "draft_requests_open": 3.0}
    router.add_worker("draft-0", "draft", counters=counters)
    prefill, decode = make_pair(router, stall_after=5)
    prefill.stall_after = 1000
    running = pool.submit(post, router)
    eventually(lambda: router.http.get("/requests").json()["stages"]["decode"])
    (found,) = router.http.get("/requests").json()["requests"]
    assert found["drafts_at"] == "draft-0"
    visit = open_page(router)
    row = "#workers tr:has(th:text-is('draft-0'))"
    visit.shows(row, "75 % right200 drafted for others")
    visit.shows(f"{row} td:nth-of-type(2)", "3")
    visit.shows(
        "#decisions", re.compile(r"Drafts: draft-0 drafts up to \d+ tokens by draft_model, for .* tokens/s")
    )
    visit.has("#diagram path.busy.decode", 1)
    visit.has("#diagram path.busy.draft", 1)
    right = "element => element.getBoundingClientRect().right"
    decodes, drafts = (
        visit.page.locator(f"#diagram g.{role}").evaluate(right) for role in ("decode", "draft")
    )
    assert decodes < drafts, "in a column of its own"
    decode.stall_after = 1000
    assert running.result(20).status_code == 200
    visit.has("#diagram path.busy", 0)


def test_it_polls_while_visible_and_reports_an_unreachable_server(router, browser):
    visit = Visit(browser, router.url, own_tab=True)  # its clock stays replaced
    visit.page.clock.install()
    with visit:
        page = visit.page
        visit.shows("#health", "2 of 2 workers ready")

        def looks(seconds: int) -> int:
            before = visit.asked.count(f"{router.url}/cluster")
            for _ in range(seconds):
                page.clock.run_for(1000)
                page.evaluate("fetch('/health').then((answer) => answer.text())")
            return visit.asked.count(f"{router.url}/cluster") - before

        def hide(hidden: bool) -> None:
            page.evaluate(
                """(hidden) => {
                    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
                    document.dispatchEvent(new Event("visibilitychange"));
                }""",
                hidden,
            )

        assert looks(4) >= 2
        hide(True)
        assert looks(4) <= 1
        assert looks(20) == 0
        hide(False)
        assert looks(4) >= 2
        page.route("**/cluster", lambda route: route.abort())
        assert 2 <= looks(10) <= 6, "less and less often"
        visit.shows("#stale", "The server does not answer. What is shown below is from before.")
        page.unroute("**/cluster")
        looks(6)
        visit.shows("#health", "2 of 2 workers ready")
        assert page.locator("#stale").is_hidden()


def test_colours_have_enough_contrast(router):
    """WCAG 2.2 demands 4.5 to 1 for text and 3 to 1 for graphics, in the light and the dark theme."""
    css = router.http.get("/page/page.css").text
    found = re.findall(r"--(\w+): light-dark\((#\w+), (#\w+)\)", css)
    colours = {name: [luminance(light), luminance(dark)] for name, light, dark in found}
    for ground in ("ground", "sheet"):
        for name, least in LEAST_CONTRAST.items():
            assert min(contrasts(colours[name], colours[ground])) >= least, (name, ground)


def contrasts(ones: list[float], others: list[float]) -> list[float]:
    pairs = [sorted(pair) for pair in zip(ones, others, strict=True)]
    return [(bright + 0.05) / (dim + 0.05) for dim, bright in pairs]


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
