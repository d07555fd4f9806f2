"""A server on CPUs that configures no speculation drafts by `suffix`: with every kind of model and option it
starts, and gives the tokens of a server that turns speculation off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.config import load_config
from engine.engine import Engine
from models.bundled import BUNDLED_FOLDER
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation
from speculation.speculator import BatchSpeculator
from tests.e2e.architectures import HYBRIDS, VOCAB_SIZE, write_model
from tests.e2e.test_token_equality import recurrent
from tests.engine import parallel_child
from tests.engine.adapter_files import write_adapter
from tests.engine.parallel_child import answer, in_child
from tests.speculation.small_engine import drafted_and_accepted, prompt_of, run, tokens

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
