"""What a simulated sequence takes of a pool with sliding windows, against the engine's own bookkeeping."""

from __future__ import annotations

import pytest

from engine.kv.block_manager import BlockManager
from engine.kv.sequence_blocks import SequenceBlocks
from planner.kv_room import Keeping
from planner.profile import LinkProfile
from planner.scenarios import Slo, Study
from planner.trace import TraceRequest
from protocol.errors import ConfigError
from protocol.window import Window
from tests.engine.fake_pool import FakePool
from tests.planner.planned import layout, profile, request, run

BLOCK, STEP = 16, 64
MIXED = (0, 100, 100, 100)


@pytest.mark.parametrize("num_tokens", [20, 130, 1000])
@pytest.mark.parametrize("windows", [(0,), (100,), MIXED, (300, 100)], ids=str)
def test_a_sequence_takes_what_the_engine_gives_it(windows: tuple[int, ...], num_tokens: int) -> None:
    """Within a block of each table, and a tile of those with a window."""
    seen = [Window(window, BLOCK) if window else None for window in windows]
    blocks = BlockManager(FakePool(BLOCK, 400), windows=seen, most_rows=STEP)  # type: ignore[arg-type]
    keeping = Keeping(windows, BLOCK, STEP)

    def taken() -> float:
        """Tokens in all tables."""
        return sum(len(held.blocks[i]) - held.num_left[i] for i in range(len(windows))) * BLOCK / len(windows)

    held = SequenceBlocks(blocks, b"root" * 4)
    held.grow(0, num_tokens, STEP)
    assert taken() == pytest.approx(keeping.prompt(num_tokens), abs=BLOCK)
    text = [*range(num_tokens + 200)]
    for end in range(STEP, num_tokens + STEP, STEP):
        held.commit(min(end, num_tokens), [], text)
    assert taken() == pytest.approx(keeping.decoding(num_tokens), abs=BLOCK + 32)
    for end in range(num_tokens, num_tokens + 200):
        held.grow(end, end + 1)
        held.commit(end + 1, [], text)
    grown = keeping.decoding(num_tokens) + 200 * keeping.growth(num_tokens, 200)
    assert taken() == pytest.approx(grown, abs=BLOCK + 32)


def test_the_longest_prompt_is_one_that_has_room() -> None:
    assert Keeping().longest(1000) == 1000
    assert Keeping((100,), BLOCK, STEP).longest(400) > 10**6
    mixed = Keeping(MIXED, BLOCK, STEP)
    longest = mixed.longest(400)
    assert mixed.prompt(longest) <= 400 < mixed.prompt(longest + 1)


@pytest.mark.parametrize(("windows", "num_running"), [((0,), 2), (MIXED, 6), ((100,), 8)], ids=str)
def test_more_sequences_run_at_once_where_layers_keep_a_window(
    windows: tuple[int, ...], num_running: int
) -> None:
    """In room for two prompts of 1000 tokens. Of them a quarter, and windows with what a step and tiles need
    beside them (280 tokens), are 460; once it is computed 349.
    """
    requests = [request(0.0, 1000, 900) for _ in range(8)]
    cluster = run(layout(0, 1), requests, profile(kv_tokens=2300, chunk_tokens=100, kv_windows=windows))
    first_end = min(each.ended for each in requests)
    assert sum(each.first_token < first_end for each in requests) == num_running
    [worker] = cluster.workers.values()
    assert worker.engine.room.available == pytest.approx(2300)


def test_where_no_layer_keeps_all_each_of_equal_prompts_takes_a_window() -> None:
    """One is cached, and needs 280 tokens until its last one is computed; behind that 132."""
    requests = [request(0.0, 1000, 1, 1), *(request(9.0, 1000, 900, 1) for _ in range(8))]
    run(layout(0, 1), requests, profile(kv_tokens=1200, chunk_tokens=100, kv_windows=(100,)))
    assert requests[1].ttft_s < 0.1
    first_end = min(each.ended for each in requests[1:])
    assert sum(each.first_token < first_end for each in requests[1:]) == 7


def test_what_is_cached_takes_room_where_no_layer_keeps_all() -> None:
    requests = [request(0.0, 1000, 2)]
    cluster = run(layout(0, 1), requests, profile(kv_tokens=600, chunk_tokens=100, kv_windows=(100,)))
    [worker] = cluster.workers.values()
    blocks = requests[0].blocks
    assert [worker.engine.room.covered(blocks[:count]) for count in (3, 10)] == [0, 10]


def test_a_hand_off_moves_the_windows_of_their_layers() -> None:
    """A second for each 1000 tokens on the wire: 300, or of these a quarter and three quarters of 100."""
    link = LinkProfile(latency_s=0.0, bytes_per_s=1000.0)

    def second_token_s(windows: tuple[int, ...]) -> float:
        [one] = requests = [request(0.0, 300, 2)]
        run(layout(1, 1, "round_robin"), requests, profile(kv_windows=windows, link=link, kv_bytes=1))
        return one.ended - one.first_token

    assert second_token_s((0,)) - second_token_s(MIXED) == pytest.approx(0.15)


def test_a_request_may_be_longer_than_all_of_a_pool() -> None:
    long = [TraceRequest(0.0, 5000, 10, [1] * 50)]
    Study(profile(kv_tokens=2000, kv_windows=(100,)), long, 100, Slo(1.0, 0.1))
    with pytest.raises(ConfigError, match=r"5010 tokens, .* has room for 3860:"):
        Study(profile(kv_tokens=1500, kv_windows=MIXED), long, 100, Slo(1.0, 0.1))


@pytest.mark.parametrize(("windows", "found"), [((0,), 1), (MIXED, 3), ((100,), 1)], ids=str)
def test_cached_prompts_take_the_room_of_layers_that_see_all(windows: tuple[int, ...], found: int) -> None:
    """Prompts of 1000 tokens one after the other, then the same from the latest on: of 2300 tokens' room one
    needs 480 while it runs.
    """
    order = [1, 2, 3, 4, 5, 5, 4, 3, 2]
    requests = [request(10.0 * place, 1000, 1, prompt) for place, prompt in enumerate(order)]
    run(layout(0, 1), requests, profile(kv_tokens=2300, chunk_tokens=100, kv_windows=windows))
    assert sum(each.ttft_s < 0.5 for each in requests[5:]) >= found
