"""An engine whose pool is too small for its prompts: lower tiers return blocks, and no token changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.engine import Engine
from engine.kv.tiers import host as host_module
from protocol.errors import ConfigError
from protocol.outputs import TokenOutput, paged_logprobs
from tests.engine.test_engine import BLOCK_BYTES, MAX_LEN, Make, ask, prompt_of, run, tiny_engine, tokens
from tests.engine.test_engine import assert_empty as assert_pool_empty
from tests.engine.tiers_parts import StuckFile
from tests.waiting import wait_until
from tests.worker.tiny_model import assert_greedy, greedy

GIB = 2**30
LENGTHS = (240, 100, 161, 48, 200, 130)


@pytest.fixture
def make_engine(folder: Path) -> Iterator[Make]:
    engines: list[Engine] = []

    def make(num_blocks: int = 17, host_blocks: int = 0, disk: Path | None = None, **options: Any) -> Engine:
        room = {
            "kv_cache_memory_bytes": num_blocks * BLOCK_BYTES,
            "kv_offloading_size": host_blocks * BLOCK_BYTES / GIB,
            "kv_disk_path": None if disk is None else str(disk),
            "kv_disk_size": 0.0 if disk is None else 400 * BLOCK_BYTES / GIB,
        }
        engines.append(tiny_engine(folder, **{"max_model_len": MAX_LEN, "max_num_seqs": 8} | room | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]


def serve(engine: Engine, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt's were cached."""
    engine.add(ask("r", prompt, **fields))
    outputs = run(engine)["r"]
    assert outputs[0].cached_tokens is not None
    return tokens(outputs), outputs[0].cached_tokens


def written(engine: Engine) -> None:
    """Wait until everything is on the disk."""
    assert engine.tiers is not None
    tiers = engine.tiers

    def idle() -> bool:
        tiers.poll()
        return engine.tiers.num_disk_queued == 0

    wait_until(idle)
    tiers.poll()


def assert_empty(engine: Engine) -> None:
    assert_pool_empty(engine)
    tiers = engine.tiers
    if tiers is not None:
        written(engine)
        assert len(tiers._free) + tiers.num_blocks == tiers._memory.num_slots


def test_prompts_return_from_the_host(make_engine: Make, reference: PreTrainedModel) -> None:
    plain, tiered = make_engine(), make_engine(host_blocks=80)
    for turn in range(3):
        for prompt in PROMPTS:
            expected = greedy(reference, prompt, 8)
            assert serve(plain, prompt)[0] == expected
            got, num_cached = serve(tiered, prompt)
            assert got == expected
            if turn > 0:
                assert num_cached == min(len(prompt) // 16 * 16, len(prompt) - 1)
    counters = tiered.counters()
    assert plain.stats().prefix_hit_tokens == 0
    assert tiered.stats().prefix_hit_tokens == 2 * sum(min(n // 16 * 16, n - 1) for n in LENGTHS)
    assert counters["kv_host_hit_blocks_total"] > 80
    assert counters["kv_host_loaded_bytes_total"] == counters["kv_host_hit_blocks_total"] * BLOCK_BYTES
    assert counters["kv_host_miss_blocks_total"] == sum((n - 1) // 16 for n in LENGTHS)
    assert plain.counters() == {}
    assert_empty(tiered)


def test_preempted_sequences_get_their_blocks_back(make_engine: Make, reference: PreTrainedModel) -> None:
    computed = []
    for host_blocks in (0, 200):
        engine = make_engine(num_blocks=20, host_blocks=host_blocks)
        prompts = [prompt_of(30, seed) for seed in range(6)]
        for index, prompt in enumerate(prompts):
            engine.add(ask(str(index), prompt, max_tokens=60))
        num_tokens, outputs = 0, {}
        while engine.has_work():
            step = engine.step()
            num_tokens += step.num_tokens
            for output in step.outputs:
                outputs.setdefault(output.request_id, []).append(output)
        assert engine.stats().num_preemptions > 0
        for index, prompt in enumerate(prompts):
            assert_greedy(reference, prompt, tokens(outputs[str(index)]), 60)
            assert [output.position for output in outputs[str(index)]] == [*range(60)]
        computed.append(num_tokens)
        assert_empty(engine)
    assert computed[1] < computed[0]


def test_tenants_are_separate_in_the_host(make_engine: Make) -> None:
    engine, prompt = make_engine(host_blocks=48), prompt_of(64, seed=9)

    def cached(**fields: Any) -> int:
        found = serve(engine, prompt, **fields)[1]
        serve(engine, prompt_of(240))
        return found

    asked = [{"cache_salt": "one"}, {"cache_salt": "two"}, {}, {"cache_salt": "one"}]
    assert [cached(**each) for each in asked] == [0, 0, 0, 63]


def test_prompt_logprobs_are_computed_despite_lower_tiers(make_engine: Make) -> None:
    engine = make_engine(host_blocks=80)
    serve(engine, PROMPTS[1])
    serve(engine, PROMPTS[0])
    engine.add(ask("scored", PROMPTS[1], sampling={"prompt_logprobs": 0}))
    output = run(engine)["scored"][0]
    assert output.cached_tokens == 0
    assert len([*paged_logprobs(output.prompt_logprobs or [])]) == len(PROMPTS[1])


def test_prompts_return_from_the_disk_even_after_a_restart(
    make_engine: Make, reference: PreTrainedModel, tmp_path: Path
) -> None:
    engine = make_engine(host_blocks=24, disk=tmp_path)
    for turn in range(2):
        for prompt in PROMPTS:
            written(engine)
            got, num_cached = serve(engine, prompt)
            assert got == greedy(reference, prompt, 8)
            assert num_cached > 0 or turn == 0
    assert engine.counters()["kv_disk_hit_blocks_total"] > 20
    assert_empty(engine)
    engine.close()
    again = make_engine(host_blocks=24, disk=tmp_path)
    assert again.tiers.totals()["kv_disk_used_blocks"] > 30
    assert "found again" in again.start_up["kv_tiers"]
    got, num_cached = serve(again, PROMPTS[0])
    assert got == greedy(reference, PROMPTS[0], 8)
    assert num_cached >= 10 * 16
    assert_empty(again)


def test_a_retrained_model_finds_no_blocks_of_the_old_one(
    make_engine: Make, folder: Path, tmp_path: Path
) -> None:
    old = make_engine(host_blocks=24, disk=tmp_path / "kv", served_model_name="m")
    for prompt in PROMPTS:
        serve(old, prompt)
    old.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    model.save_pretrained(tmp_path / "new")
    new = make_engine(
        host_blocks=24, disk=tmp_path / "kv", served_model_name="m", model=str(tmp_path / "new")
    )
    assert new.counters()["kv_disk_foreign_files_total"] == 1
    assert new.cache_format.root() != old.cache_format.root(), "nor in another worker's pool"
    assert serve(new, PROMPTS[0])[1] == 0


@pytest.fixture
def stuck_engine(make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Make an engine whose first prompts are on a disk that does not answer until `StuckFile.go`."""
    monkeypatch.setattr(StuckFile, "go", threading.Event(), raising=False)
    monkeypatch.setattr("engine.assembly.SlotFile", StuckFile)
    StuckFile.go.set()
    # Twice the blocks of a prompt: the host drops none, however slow the disk is.
    engine = make_engine(num_blocks=34, host_blocks=48, disk=tmp_path)
    for prompt in [*PROMPTS, *(prompt_of(240, seed) for seed in range(70, 78))]:
        serve(engine, prompt)
        written(engine)
    assert engine.counters()["kv_disk_dropped_blocks_total"] == 0
    StuckFile.go.clear()
    yield engine
    StuckFile.go.set()


def test_other_requests_run_while_a_prompt_comes_from_the_disk(
    stuck_engine: Engine, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "FETCH_TIMEOUT_S", 60.0)
    engine, woken = stuck_engine, threading.Event()
    engine.on_ready = woken.set
    engine.add(ask("from disk", PROMPTS[0]))
    engine.add(ask("other", prompt_of(40, seed=50)))
    outputs: list[TokenOutput] = []
    while len(tokens(outputs)) < 8:
        outputs += engine.step().outputs
        assert {output.request_id for output in outputs} <= {"other"}
    assert tokens(outputs) == greedy(reference, prompt_of(40, seed=50), 8)
    assert engine.step().num_tokens == 0
    assert engine.has_work()
    assert not woken.is_set()
    StuckFile.go.set()
    assert woken.wait(20)
    outputs = run(engine)["from disk"]
    assert tokens(outputs) == greedy(reference, PROMPTS[0], 8)
    assert outputs[0].cached_tokens is not None and outputs[0].cached_tokens >= 10 * 16
    assert engine.counters()["kv_disk_fetch_timeouts_total"] == 0
    assert_empty(engine)


def test_an_aborted_fetch_leaves_nothing_behind(stuck_engine: Engine) -> None:
    engine = stuck_engine
    engine.add(ask("from disk", PROMPTS[0]))
    assert engine.step().num_tokens == 0
    assert engine.abort("from disk")
    assert not engine.has_work()
    StuckFile.go.set()
    assert_empty(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 1000 / GIB}, "--kv-offloading-size: .* hold 0 blocks of 8192 bytes"),
        ({"kv_offloading_size": 900_000.0}, "--kv-offloading-size: .* GiB free"),
        ({"host_blocks": 3, "disk": "kv"}, "--kv-offloading-size: .* at least 4"),
        ({"host_blocks": 8, "disk": "kv", "kv_disk_size": 1e-9}, "--kv-disk-size: .* no block of 8192 bytes"),
        ({"host_blocks": 8, "disk": "kv", "kv_disk_size": 900_000.0}, "--kv-disk-size: .* asked for"),
        ({"host_blocks": 8, "disk": "file"}, "--kv-disk-path: cannot use"),
        ({"host_blocks": 8, "disk": "taken"}, "--kv-disk-path: cannot use .*worker-0"),
    ],
)
def test_unavailable_tiers_name_the_flag(
    make_engine: Make, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "taken" / "worker-0" / "blocks").mkdir(parents=True)
    if "disk" in options:
        options = options | {"disk": tmp_path / options["disk"]}
    with pytest.raises(ConfigError, match=message):
        make_engine(**options)
