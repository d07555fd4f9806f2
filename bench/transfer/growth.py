"""How bytes, extents and time grow with the prompt and with the number of pairs: a table and a plot."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.record import made_by, write_results
from bench.transfer.raw import MODEL_BLOCK, TOTAL_BYTES
from bench.transfer.sides import Moved, Pair, scattered

BLOCK_SIZE = 16
TRANSPORTS = ("shm", "tcp")
NAME = "transfer-growth"
PROMPTS = tuple(128 * 2**power for power in range(9))
PAIRS = (1, 2, 4, 8, 16)
PAIR_PROMPT = 1024


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one case. `layout`: whether the prompt's blocks follow each other in the sender's pool."""

    transport: str
    layout: str
    tokens: int
    pairs: int
    nbytes: int
    extents: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9


def by_prompt(repeats: int) -> Iterable[Point]:
    """One pair. Long prompts repeat the sender's blocks, of which there are fewer than they need."""
    source_blocks = TOTAL_BYTES // MODEL_BLOCK
    layouts = {"contiguous": list(range(source_blocks)), "scattered": scattered(source_blocks)}
    for transport in TRANSPORTS:
        with Pair([transport], MODEL_BLOCK, source_blocks, PROMPTS[-1] // BLOCK_SIZE) as pair:
            for tokens in PROMPTS:
                needed = tokens // BLOCK_SIZE
                for layout, order in layouts.items():
                    source = (order * (needed // source_blocks + 1))[:needed]
                    moves = [pair.move(transport, source) for _ in range(repeats + 1)][1:]
                    yield _point(transport, layout, tokens, 1, moves)


def by_pairs(repeats: int) -> Iterable[Point]:
    """Each pair has processes of its own, and all push a prompt at the same time."""
    blocks = PAIR_PROMPT // BLOCK_SIZE
    with ExitStack() as stack:
        pairs = [stack.enter_context(Pair(TRANSPORTS, MODEL_BLOCK, blocks)) for _ in range(PAIRS[-1])]
        for transport in TRANSPORTS:
            for count in PAIRS:
                moves = [_move_at_once(pairs[:count], transport) for _ in range(repeats + 1)][1:]
                yield _point(transport, "scattered", PAIR_PROMPT, count, moves)


def _move_at_once(pairs: Sequence[Pair], transport: str) -> Moved:
    started = time.perf_counter()
    leases = [pair.begin(transport, scattered(pair.num_blocks)) for pair in pairs]
    moves = [pair.end(lease) for pair, lease in zip(pairs, leases, strict=True)]
    seconds = time.perf_counter() - started
    return Moved(seconds, sum(each.nbytes for each in moves), sum(each.num_extents for each in moves))


def _point(transport: str, layout: str, tokens: int, pairs: int, moves: Sequence[Moved]) -> Point:
    return Point(
        transport=transport,
        layout=layout,
        tokens=tokens,
        pairs=pairs,
        nbytes=moves[0].nbytes,
        extents=moves[0].num_extents,
        seconds=statistics.median(each.seconds for each in moves),
    )


def describe(point: Point) -> str:
    return (
        f"{point.transport}, {point.pairs} pairs, {point.tokens} tokens, {point.layout}: "
        f"{point.nbytes / 2**20:.0f} MiB, {point.extents} extents, {point.seconds * 1e3:.1f} ms"
    )


def as_markdown(prompts: Sequence[Point], pairs: Sequence[Point], command: str) -> str:
    """Both tables, with how they were made."""
    lines = [
        "# How a hand-off's cost grows",
        "",
        f"Blocks of {BLOCK_SIZE} tokens of a 0.6B model in bfloat16 ({MODEL_BLOCK // 1024} KiB). Medians.",
        made_by(command),
        "An extent is a run of blocks that follow each other on both sides, cut at pieces of 16 MiB.",
        "",
        "![time and rate](growth.svg)",
    ]
    titles = ("One pair, by the prompt's length", f"Pairs at the same time, {PAIR_PROMPT} tokens each")
    for title, points in zip(titles, (prompts, pairs), strict=True):
        lines += [
            "",
            f"## {title}",
            "",
            "| transport | blocks | tokens | pairs | MiB | extents | ms | GB/s |",
        ]
        lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
        lines += [
            f"| {point.transport} | {point.layout} | {point.tokens} | {point.pairs} "
            f"| {point.nbytes / 2**20:.0f} | {point.extents} | {point.seconds * 1e3:.1f} "
            f"| {point.gigabytes_per_second:.2f} |"
            for point in points
        ]
    return "\n".join(lines) + "\n"


def plot(prompts: Sequence[Point], pairs: Sequence[Point], path: Path) -> None:
    """Time by the prompt's length, and the rate of all pairs together by their number."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for transport in TRANSPORTS:
        for layout, style in (("contiguous", "-o"), ("scattered", "--x")):
            chosen = [each for each in prompts if (each.transport, each.layout) == (transport, layout)]
            times = [each.seconds * 1e3 for each in chosen]
            left.plot([each.tokens for each in chosen], times, style, label=f"{transport}, {layout}")
        together = [each for each in pairs if each.transport == transport]
        rates = [each.gigabytes_per_second for each in together]
        right.plot([each.pairs for each in together], rates, "-o", label=transport)
    left.set(xscale="log", yscale="log", xlabel="tokens in the prompt", ylabel="ms", title="One pair")
    right.set(xlabel="pairs", ylabel="GB/s, all pairs", title=f"{PAIR_PROMPT} tokens each", ylim=0)
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def write(folder: Path, prompts: Sequence[Point], pairs: Sequence[Point], command: str) -> None:
    """The tables, the plot and the figures as JSON, in `folder`."""
    content = {"prompts": msgspec.to_builtins(prompts), "pairs": msgspec.to_builtins(pairs)}
    write_results(folder, command, content)
    (folder / "README.md").write_text(as_markdown(prompts, pairs, command))
    plot(prompts, pairs, folder / "growth.svg")
