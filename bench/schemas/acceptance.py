"""What part of the drafted tokens is accepted with a schema and without one, by method.

    python -m bench.schemas.acceptance [--methods suffix,draft_model,eagle] [--schemas 100]

The bundled model is served with each method in turn and goes on from each prompt of the suite twice: with the
prompt's schema, then as far without it, sampling at random. Drafts that the schema forbids are cut, and not
verified. Text that it forces is drafted as the method `grammar`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx

from bench.own_server import serving
from bench.schemas.__main__ import ACCEPTED, by_method, flags
from bench.schemas.suite import Case, load

CLIENTS = 8
REPORTED_S = 2.0
VERIFIED = "tandem_spec_decode_num_draft_tokens_total"
CUT = "tandem_spec_decode_cut_tokens_total"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="suffix,draft_model,eagle")
    parser.add_argument("--schemas", type=int, default=100)
    options = parser.parse_args()
    cases = load()[: options.schemas]
    for method in options.methods.split(","):
        with serving(flags("colocated", method)) as http, ThreadPoolExecutor(CLIENTS) as clients:
            lengths = list(clients.map(lambda case: ask(http, case, None), cases))
            with_schema = settled(http)
            list(clients.map(lambda case, length: ask(http, case, length), cases, lengths))
            without = settled(http) - with_schema
        show(method, "with a schema", with_schema)
        show(method, "without one", without)


def ask(http: httpx.Client, case: Case, length: int | None) -> int:
    """Returns the answer's tokens: so many as `length`, without the schema, where that is given."""
    freely = {"response_format": None, "logit_bias": None, "max_tokens": length, "ignore_eos": True}
    answer = http.post("/v1/completions", json=case.request(**({} if length is None else freely)))
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


def settled(http: httpx.Client) -> Counter[tuple[str, str]]:
    """Counts, once workers have reported all."""
    before: Counter[tuple[str, str]] | None = None
    while (now := counted(http)) != before:
        before = now
        time.sleep(REPORTED_S)
    return now


def counted(http: httpx.Client) -> Counter[tuple[str, str]]:
    """By the server since its start: metric and method."""
    metrics = http.get("/metrics").text
    return Counter(
        {
            (name, method): int(count)
            for name in (VERIFIED, ACCEPTED, CUT)
            for method, count in by_method(metrics, name).items()
        }
    )


def show(method: str, way: str, counts: Counter[tuple[str, str]]) -> None:
    for drafter in dict.fromkeys((method, "grammar")):
        if verified := counts[VERIFIED, drafter]:
            part, cut = counts[ACCEPTED, drafter] / verified, counts[CUT, drafter]
            print(f"{method:12} {way:14} {drafter:12} {part:.3f} of {verified} accepted, {cut} cut")


if __name__ == "__main__":
    main()
