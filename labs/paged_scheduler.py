"""A paged scheduler: many requests share one memory for their keys and values, block by block.

    python -m labs.paged_scheduler

`Blocks` hands out the memory, `Scheduler` chooses what the next step computes, `PagedAttention` reads keys
through a request's list of blocks, `serve` runs all requests. Three ways to use a memory are compared:

- static: each request reserves room for the longest text; a new batch starts when the last request has ended.
- continuous: as before, but an ended request is replaced at once (Orca, Yu et al., 2022).
- paged: requests take blocks as they grow (PagedAttention, Kwon et al., 2023); without a free block one is
preempted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from labs.decoding import TARGET, Llama, ask_server, attend, read_prompt

MAX_LENGTH = 512
"""Most tokens of a request, including its answer. Without paging each request reserves this many."""


@dataclass(eq=False)
class Request:
    """A request. The keys and values of the first `computed` of its `tokens` are in `blocks`."""

    tokens: list[int]
    end: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    first_token_s: float = 0.0

    @property
    def is_finished(self) -> bool:
        return len(self.tokens) == self.end


class Blocks:
    """The numbers of the free blocks."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count))

    def extend(self, request: Request, tokens: int) -> bool:
        """Give the request blocks for `tokens` tokens in all. If too few are left, give none and return
        False.
        """
        missing = -(-tokens // self.size) - len(request.blocks)
        if missing > len(self._free):
            return False
        request.blocks += [self._free.pop() for _ in range(missing)]
        return True

    def take_back(self, request: Request) -> None:
        self._free += request.blocks
        request.blocks, request.computed = [], 0

    @property
    def used(self) -> int:
        return self.count - len(self._free)


class Scheduler:
    """The choice of each step: at most `budget` tokens, one per decoding request, the rest for prompts."""

    def __init__(self, blocks: Blocks, policy: str, budget: int = 256) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._blocks, self._policy, self._budget = blocks, policy, budget

    def schedule(self) -> list[tuple[Request, int]]:
        """Return the requests of the next step and how many tokens each computes."""
        self._admit()
        step, left = [], self._budget
        for request in list(self.running):
            count = min(len(request.tokens) - request.computed, left)
            if count and request in self.running and self._make_room(request, request.computed + count):
                step.append((request, count))
                left -= count
        return [(request, count) for request, count in step if request in self.running]

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self._blocks.take_back(request)

    def _admit(self) -> None:
        if self._policy == "static" and self.running:
            return
        while self.waiting:
            request = self.waiting[0]
            room = len(request.tokens) if self._policy == "paged" else MAX_LENGTH
            if not self._blocks.extend(request, room):
                return
            self.running.append(self.waiting.popleft())

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Preempt the latest request, to be computed again later. Return False if it is `request`."""
        while not self._blocks.extend(request, tokens):
            last = self.running.pop()
            self._blocks.take_back(last)
            self.waiting.appendleft(last)
            self.preemptions += 1
            if last is request:
                return False
        return True


class PagedAttention:
    """Attention over a memory [layers, slots, KV heads, size]; a block is `block_size` slots."""

    def __init__(self, model: Llama, blocks: Blocks) -> None:
        shape = (model.layers, blocks.count * blocks.size, model.kv_heads, model.size)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        self._block_size = blocks.size
        self._step: list[tuple[Tensor, int]] = []
        self._new_slots = torch.empty(0, dtype=torch.long)

    def begin(self, step: Sequence[tuple[Request, int]]) -> None:
        """Look up the slots of each request's tokens, including the tokens that the step computes."""
        self._step = [(self._slots(request)[: request.computed + count], count) for request, count in step]
        self._new_slots = torch.cat([slots[-count:] for slots, count in self._step])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys[self._new_slots], values[self._new_slots] = k, v
        rows = q.split([count for _, count in self._step])
        contexts = [slots for slots, _ in self._step]
        return torch.cat(
            [attend(own, keys[slots], values[slots]) for own, slots in zip(rows, contexts, strict=True)]
        )

    def _slots(self, request: Request) -> Tensor:
        starts = torch.tensor(request.blocks) * self._block_size
        return (starts[:, None] + torch.arange(self._block_size)).flatten()


@dataclass(frozen=True)
class Report:
    seconds: float
    tokens: int
    steps: int
    mean_running: float
    mean_taken: float
    mean_filled: float
    preemptions: int
    median_first_token_s: float


def serve(
    model: Llama, requests: Sequence[Request], policy: str, num_blocks: int, block_size: int = 16
) -> Report:
    """Run requests that all arrive at the start to their ends."""
    blocks = Blocks(num_blocks, block_size)
    scheduler, attention = Scheduler(blocks, policy), PagedAttention(model, blocks)
    scheduler.waiting.extend(requests)
    goal = sum(request.end - len(request.tokens) for request in requests)
    start, running, taken, filled = time.perf_counter(), [], [], []
    while scheduler.waiting or scheduler.running:
        step = scheduler.schedule()
        if not step:
            raise RuntimeError(f"a request needs more than the {num_blocks} blocks that there are")
        running.append(len(step))
        taken.append(blocks.used / num_blocks)
        filled.append(sum(request.computed for request in scheduler.running) / (num_blocks * block_size))
        for request in run_step(model, attention, step):
            request.first_token_s = request.first_token_s or time.perf_counter() - start
            if request.is_finished:
                scheduler.finish(request)
    return Report(
        seconds=time.perf_counter() - start,
        tokens=goal,
        steps=len(running),
        mean_running=statistics.mean(running),
        mean_taken=statistics.mean(taken),
        mean_filled=statistics.mean(filled),
        preemptions=scheduler.preemptions,
        median_first_token_s=statistics.median(request.first_token_s for request in requests),
    )


def run_step(model: Llama, attention: PagedAttention, step: Sequence[tuple[Request, int]]) -> list[Request]:
    """Compute the rows of all requests at once. Return the requests that got a token."""
    attention.begin(step)
    tokens = [token for request, count in step for token in request.tokens[request.computed :][:count]]
    positions = [request.computed + row for request, count in step for row in range(count)]
    logits = model(torch.tensor(tokens), torch.tensor(positions), attention)
    grown, row = [], -1
    for request, count in step:
        row += count
        request.computed += count
        if request.computed == len(request.tokens):
            request.tokens.append(int(logits[row].argmax()))
            grown.append(request)
    return grown


def make_requests(count: int, seed: int = 0) -> list[Request]:
    """Make requests with prompts of 16 to 128 tokens and answers of 8 to 256: most are short, some are
    long.
    """
    tokenizer, chance = Tokenizer.from_file(str(TARGET / "tokenizer.json")), random.Random(seed)
    text, requests = read_prompt(tokenizer, 1024), []
    for _ in range(count):
        length, start = chance.randint(16, 128), chance.randrange(512)
        answer = min(256, 8 + int(chance.expovariate(1 / 60)))
        requests.append(Request(text[start : start + length], end=length + answer))
    return requests


def ask_all(url: str, requests: Sequence[Request]) -> float:
    """Return the tokens per second of a server that gets all requests at once."""
    counts = [request.end - len(request.tokens) for request in requests]
    start = time.perf_counter()
    with ThreadPoolExecutor(len(requests)) as threads:
        list(threads.map(lambda request, count: ask_server(url, request.tokens, count), requests, counts))
    return sum(counts) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=128, help="of 16 tokens: the memory that all share")
    parser.add_argument("--url", help="a server of the same model, e.g. http://127.0.0.1:8000")
    options = parser.parse_args()
    model = Llama(TARGET)
    print(f"{options.requests} requests, memory for {options.blocks * 16} tokens, at most {MAX_LENGTH} each")
    columns = ("tokens/s", "steps", "running", "taken", "filled", "preempted", "first token")
    print(f"{'':12}" + "".join(f"{column:>12}" for column in columns))
    for policy in ("static", "continuous", "paged"):
        report = serve(model, make_requests(options.requests), policy, options.blocks)
        print(
            f"{policy:12}{report.tokens / report.seconds:12.0f}{report.steps:12}{report.mean_running:12.1f}"
            f"{report.mean_taken:12.0%}{report.mean_filled:12.0%}{report.preemptions:12}"
            f"{report.median_first_token_s:10.2f} s"
        )
    if options.url:
        print(f"{'server':12}{ask_all(options.url, make_requests(options.requests)):12.0f}")


if __name__ == "__main__":
    main()
