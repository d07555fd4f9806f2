"""Takes pictures of the page at `/` with an answer whose accepted drafts are tinted.

`python -m tests.screenshots` writes the README's, docs/images/page.png. `python -m tests.screenshots FOLDER`
writes the whole page there at three widths, light and dark, and the API's documentation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.speculation import SpeculativeConfig
from tests.chromium import Visit, open_browser
from tests.e2e.serving import HttpServing

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

ROOT = Path(__file__).parents[1]
WORKERS = {"prefill-0": "", "decode-0": ""}
WIDTHS = (1300, 800, 390)
SAMPLES = ("long", "edit")


def ask(visit: Visit) -> None:
    """Let two samples be answered. The page shows the second answer, the drafts and how both were placed."""
    for name in SAMPLES:
        visit.page.click(f"[data-sample={name}]")
        visit.shows("#facts", " tokens in ")
    visit.shows("#workers", "suffix:")
    visit.shows("#decisions", "then")  # a token, as the outcome says


def take_all(browser: BrowserContext, url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        with Visit(browser, url, width=width, height=900) as visit:
            ask(visit)
            for theme in ("light", "dark"):
                visit.page.emulate_media(color_scheme=theme, reduced_motion="reduce")
                visit.page.screenshot(path=folder / f"page-{width}-{theme}.png", full_page=True)
            visit.page.goto(f"{url}/docs")
            visit.page.screenshot(path=folder / f"docs-{width}.png")


def main() -> None:
    options = {"dtype": "bfloat16", "shutdown_timeout": 0.1, "placement": "cost"}
    options |= {"kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 512}
    drafts = SpeculativeConfig(method="suffix")
    model = ROOT / "models" / "tandem-code-10m"
    with (
        open_browser() as browser,
        HttpServing(model, WORKERS, speculative_config=drafts, **options) as serving,
    ):
        serving.router.expect({name: name.partition("-")[0] for name in WORKERS})
        if len(sys.argv) > 1:
            take_all(browser, serving.url, Path(sys.argv[1]))
            return
        with Visit(browser, serving.url, width=1280, height=860) as visit:
            ask(visit)
            visit.page.screenshot(path=ROOT / "docs" / "images" / "page.png")


if __name__ == "__main__":
    main()
