"""What a draft costs that needs no model: microseconds of processor time a request in each step.

    python -m bench.drafting [--requests 64] [--context 1000,4000,32000] [--steps 20]

Requests grow along Python's standard library, as the bundled tokenizer has it; its other half was output
earlier, for suffix decoding. The first step of a request reads its whole context; of those that follow it is
the median. `tau` is of these texts, as if a model were to write them again.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from pathlib import Path

from transformers import AutoTokenizer

from engine.sequence import SequenceState
from models.bundled import BUNDLED_MODEL
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from speculation.drafter import Drafter
from speculation.weightless.lookahead import LookaheadDrafter
from speculation.weightless.ngram import NgramDrafter
from speculation.weightless.suffix import SuffixDrafter

K = 8
OUTPUT_TOKENS = 500
"""Of each earlier request."""


def standard_library(num_tokens: int) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    token_ids: list[int] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        token_ids += tokenizer(file.read_text(errors="replace"), verbose=False)["input_ids"]
        if len(token_ids) >= num_tokens:
            break
    return token_ids


def sequence(name: str, prompt: list[int], output: list[int]) -> SequenceState:
    sampling = SamplingParams(max_tokens=1_000_000)
    request = EngineRequest(
        request_id=name, prompt_token_ids=prompt, output_token_ids=output, sampling=sampling
    )
    return SequenceState(request, order=0)


class Requests:
    """Texts that grow token by token along what they are to become."""

    def __init__(self, corpus: list[int], number: int, context: int, steps: int) -> None:
        length = context + steps * (K + 1)
        begins = [i * max(1, len(corpus) - length) // number for i in range(number)]
        self._texts = [corpus[begin : begin + length] for begin in begins]
        self.sequences = [sequence(str(i), text[:context], []) for i, text in enumerate(self._texts)]

    def accept(self, drafts: list[list[int]]) -> int:
        """Take what is right of each draft, and one token more; returns how many tokens that were."""
        total = 0
        for text, running, draft in zip(self._texts, self.sequences, drafts, strict=True):
            known = len(running.token_ids)
            right = next((i for i, token in enumerate(draft) if token != text[known + i]), len(draft))
            for token in text[known : known + right + 1]:
                running.append(token)
            total += right + 1
        return total


def measure(drafter: Drafter, requests: Requests, steps: int, num_rows: int) -> tuple[float, float, float]:
    """Seconds a request of the first step and of a later one, and tokens a step."""
    rooms, seconds, total = [num_rows] * len(requests.sequences), [], 0
    for _ in range(steps):
        started = time.thread_time()
        drafts = drafter.propose(requests.sequences, rooms)
        seconds.append((time.thread_time() - started) / len(rooms))
        total += requests.accept([draft.token_ids if draft and not draft.parents else [] for draft in drafts])
    return seconds[0], statistics.median(seconds[1:]), total / steps / len(rooms)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", default="1000,4000,32000")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    corpus = standard_library(1_000_000)
    middle = len(corpus) // 2
    options = SpeculativeConfig(method="suffix")
    print(f"{'context':>8}  {'method':24}{'first step':>12}{'later':>9}  us a request, {'tau':>9}")
    for context in map(int, arguments.context.split(",")):
        drafters: dict[str, tuple[Drafter, int]] = {
            "ngram": (NgramDrafter(options), K),
            "suffix": (SuffixDrafter(options), K),
            "suffix, earlier outputs": (SuffixDrafter(options), K),
            "lookahead": (LookaheadDrafter(options, []), options.lookahead_rows),
        }
        earlier = drafters["suffix, earlier outputs"][0]
        for begin in range(0, middle, OUTPUT_TOKENS):
            earlier.begin(sequence("earlier", [0], corpus[begin : begin + OUTPUT_TOKENS]), 0, None)
            earlier.forget("earlier")
        for name, (drafter, num_rows) in drafters.items():
            requests = Requests(corpus[middle:], arguments.requests, context, arguments.steps)
            first, later, tau = measure(drafter, requests, arguments.steps, num_rows)
            shown = "-" if name == "lookahead" else f"{tau:.2f}"
            print(f"{context:8}  {name:24}{first * 1e6:12.1f}{later * 1e6:9.1f}  {shown:>23}")


if __name__ == "__main__":
    main()
