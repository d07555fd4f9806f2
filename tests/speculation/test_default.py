"""Drafters that nobody configured, and custom ones with invalid drafts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from deploy.config import load_config
from engine.engine import Engine
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from models.bundled import BUNDLED_FOLDER
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation
from speculation.drafter import Drafter
from speculation.sources import problem
from speculation.speculator import BatchSpeculator
from tests.e2e.architectures import HYBRIDS, VOCAB_SIZE, write_model
from tests.e2e.test_token_equality import recurrent
from tests.engine import parallel_child
from tests.engine.adapter_files import write_adapter
from tests.engine.parallel_child import answer, in_child
from tests.speculation.small_engine import VOCAB_SIZE as SMALL_VOCAB
from tests.speculation.small_engine import (
    ask,
    drafted_and_accepted,
    drafting,
    native_config,
    prompt_of,
    run,
    tokens,
)

LIMITS = {"device": "cpu", "dtype": "float32", "compile": "off", "max_num_batched_tokens": 50}
LIMITS |= {"max_num_seqs": 5, "kv_cache_memory_bytes": 8 << 20}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.7, "seed": 3, "top_p": 0.9},
    "logprobs": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"temperature": 0.5, "seed": 4, "repetition_penalty": 1.2, "min_tokens": 4},
}


def config_of(model: Path, speculates: bool, **options: Any) -> ServeConfig:
    """Return the configuration of a server without --speculative-config, or of one that turns it off."""
    off = {} if speculates else {"speculative_config": {"method": "none"}}
    return load_config({"model": str(model), **LIMITS, **options, **off}, environ={})


def requests(speculates: bool) -> list[EngineRequest]:
    """Return requests whose prompts repeat themselves. Half of them draft however little it pays."""
    fixed = RequestSpeculation(num_speculative_tokens=4) if speculates else None
    return [
        EngineRequest(
            request_id=f"{name} {number}",
            prompt_token_ids=prompt_of(9, number, VOCAB_SIZE) * (2 + number),
            sampling=SamplingParams(max_tokens=16, ignore_eos=True, **sampling),
            speculation=fixed if number else None,
        )
        for name, sampling in SAMPLING.items()
        for number in range(2)
    ]


def check(model: Path, *, drafts: bool = True, **options: Any) -> None:
    """Compare the tokens of the two servers, and tell whether any were drafted."""
    found = {}
    for speculates in (True, False):
        engine = Engine(config_of(model, speculates, **options), speculate=BatchSpeculator)
        asked = requests(speculates)
        if engine.adapters is not None:
            (adapter,) = engine.adapters.listed()
            asked += [
                msgspec.structs.replace(each, request_id=f"{each.request_id} adapted", adapter=adapter)
                for each in asked
            ]
        found[speculates] = run(engine, asked)
        engine.close()
    assert tokens(found[True]) == tokens(found[False])
    assert len({token for each in tokens(found[False]).values() for token in each}) > 10, (
        "a test that cannot fail"
    )
    assert (drafted_and_accepted(found[True])[0] > 0) == drafts
    assert drafted_and_accepted(found[False]) == (0, 0)


FAMILIES = ["llama", "mistral", "gemma3_text", "gpt_oss", "gpt2", "deepseek_v3", "gemma4_text"]
FAMILIES += ["qwen3_5_text", "kimi_linear", "falcon_h1", "jamba", "lfm2"]


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=recurrent) if name in HYBRIDS else name for name in FAMILIES]
)
def test_every_kind_of_model(model_type: str, tmp_path: Path) -> None:
    """Windows, sinks, latents, experts, shared KV and recurrent states."""
    write_model(model_type, tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("name", ["tandem-code-10m", pytest.param("tandem-code-10m-hybrid", marks=recurrent)])
def test_the_bundled_models(name: str) -> None:
    check(BUNDLED_FOLDER / name, dtype="bfloat16", compile="auto")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model("llama", folder)
    write_adapter(folder, folder / "adapter", 1)
    return folder


@pytest.mark.parametrize(
    ("model_type", "dtype", "drafts"),
    [("minimax", "bfloat16", False), ("minimax", "float32", True), ("llama", "bfloat16", True)],
)
def test_it_drafts_nothing_unasked_where_bits_depend_on_the_batch(
    model_type: str, dtype: str, drafts: bool, tmp_path: Path
) -> None:
    """Torch multiplies for MiniMax's experts, so that drafted rows could change a token in 16 bits."""
    write_model(model_type, tmp_path)
    engine = Engine(config_of(tmp_path, True, dtype=dtype), speculate=BatchSpeculator)
    told = engine.start_up.get("speculation", "")
    assert told.startswith("none") != drafts
    # Requests that ask for drafts get them anywhere.
    settings = (RequestSpeculation(), RequestSpeculation(method="suffix", num_speculative_tokens=4))
    for asked, expected in [(None, drafts), *[(each, True) for each in settings]]:
        request = EngineRequest(
            request_id="",
            prompt_token_ids=prompt_of(9, 1, VOCAB_SIZE) * 3,
            sampling=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
            speculation=asked,
        )
        found = run(engine, [request])
        assert (drafted_and_accepted(found)[0] > 0) == expected, asked
    engine.close()


OPTIONS: dict[str, dict[str, Any]] = {
    "coded KV": {"kv_cache_dtype": "int8"},
    "rounded weights": {"quantization": "int4", "quantize_lm_head": True},
    "KV not paged": {"paged_kv": False},
    "KV on the host": {"kv_offloading_size": 0.01, "kv_cache_memory_bytes": 1 << 20},
    "no prefix cache": {"enable_prefix_caching": False, "block_size": 1},
    "half": {"dtype": "float16"},
    "torch's attention": {"attention_backend": "sdpa"},
    "compiled": {"compile": "on"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_kind_of_option(name: str, llama: Path) -> None:
    check(llama, **OPTIONS[name])


def test_adapters(llama: Path) -> None:
    check(llama, lora_modules=[f"one={llama / 'adapter'}"])


@pytest.mark.parametrize(
    "limits",
    [{"max_num_seqs": 1, "max_num_batched_tokens": 1}, {"max_num_seqs": 2, "max_num_batched_tokens": 2}],
)
def test_steps_without_room_for_drafts(limits: dict[str, Any], llama: Path) -> None:
    check(llama, drafts=limits["max_num_batched_tokens"] > 1, **limits)


@pytest.mark.parametrize("length", [2, 33, 66])
def test_a_start_without_room_to_measure(length: int, llama: Path) -> None:
    """The pool has room for a single sequence of this length."""
    nbytes = (1 + -(-length // 16)) * 16 * 3 * 2 * 2 * 16 * 4
    config = config_of(llama, True, max_model_len=length, kv_cache_memory_bytes=nbytes)
    engine = Engine(config, speculate=BatchSpeculator)
    params = SamplingParams(max_tokens=length // 2, temperature=0.0, ignore_eos=True)
    asked = EngineRequest(request_id="", prompt_token_ids=[5] * (length // 2), sampling=params)
    assert len(run(engine, [asked])[""].token_ids) == length // 2


def test_ranks(llama: Path) -> None:
    """Two ranks compute what one does."""
    found = []
    for speculates in (True, False):
        config = msgspec.to_builtins(config_of(llama, speculates))
        encoded = [msgspec.msgpack.encode(each) for each in requests(speculates)]
        _, results, _ = answer(in_child(parallel_child.run, config, 2, "shared memory", encoded))
        drafted = sum(drafted for each in results.values() for _, drafted, _ in each[1::2])
        assert (drafted > 0) == speculates
        found.append(
            {name: [token for step in each[::2] for token in step] for name, each in results.items()}
        )
    assert found[0] == found[1]


HERE = "tests.speculation.test_default"


class WrongDrafter(Drafter):
    """Drafts what no step can run, and sometimes what one can."""

    def __init__(self, *arguments: Any) -> None:
        self._made = 0

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        self._made += 1
        kinds = [
            Draft([5] * (counts[0] + 1)),
            Draft([SMALL_VOCAB]),
            Draft([-1]),
            Draft([]),
            Draft([5, 6], parents=[-1]),
            Draft([5, 6], parents=[1, -1]),
            Draft([5]),
        ]
        return [kinds[self._made % len(kinds)] for _ in sequences]


def no_drafter(*arguments: Any) -> str:
    return "none"


def deployed(target: Path, drafter: str) -> Engine:
    return drafting(native_config(target), method="custom", drafter=drafter, num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("drafter", "why"),
    [
        ("nowhere:Drafter", "there is no nowhere:Drafter: No module named 'nowhere'"),
        (f"{HERE}:Missing", "there is no .*: module .* has no attribute 'Missing'"),
        ("examples.custom drafter:X", "there is no examples.custom drafter:X"),
        (f"{HERE}:HERE", "is neither a class nor a function"),
        (f"{HERE}:no_drafter", "makes a str, not a speculation.drafter.Drafter"),
    ],
)
def test_objects_that_are_no_drafters_are_refused(target: Path, drafter: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^--speculative-config: drafter: .*{why}"):
        deployed(target, drafter)


def test_invalid_drafts_are_dropped(target: Path, caplog: pytest.LogCaptureFixture) -> None:
    requests = [ask(f"r{i}", prompt_of(20, i), 24, ignore_eos=True) for i in range(2)]
    plain = tokens(run(Engine(native_config(target)), requests))
    engine = deployed(target, f"{HERE}:WrongDrafter")
    assert tokens(run(engine, requests)) == plain
    assert engine._speculator is not None
    assert engine._speculator.counters()["spec_decode_refused_drafts_total"] > 10
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line for line in lines if "are dropped" in line] == lines[:1]


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        (Draft([1, 2]), ""),
        (Draft([1, 2, 3], parents=[-1, -1, 0]), ""),
        (Draft([1, 2], probes=[0b11, 0b101]), ""),
        (Draft([1, 2, 3, 4]), "it has 4 tokens, where 1 to 3 were asked for"),
        (Draft([]), "it has 0 tokens, where 1 to 3 were asked for"),
        (Draft([9, 10]), "the token 10 is not among the model's 10"),
        (Draft([1, 2], parents=[-1]), "it has 2 nodes and 1 parents"),
        (Draft([1, 2], parents=[-1, 1]), "a node does not come after its parent"),
        (Draft([1], parents=[-2]), "a node does not come after its parent"),
    ],
)
def test_the_fault_of_a_draft_is_reported(draft: Draft, why: str) -> None:
    assert problem(draft, 3, 10) == why
