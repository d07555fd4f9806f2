"""Ranks that workers can't have are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.config import load_config
from deploy.tensor_parallel import check_heads
from protocol.errors import ConfigError

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 90}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tmp_path)


def test_sizes_that_divide_the_attention_heads(model: str) -> None:
    flags = {"model": model, "prefill_tensor_parallel_size": 6, "decode_tensor_parallel_size": 3}
    config = load_config(flags, {})
    check_heads(config, HEADS)
    assert (config.num_workers, config.total_ranks) == (2, 9)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"decode_tensor_parallel_size": 0}, "--decode-tensor-parallel-size: .*>= 1.*got 0"),
        ({"decode_tensor_parallel_size": 65}, "--decode-tensor-parallel-size: .*<= 64.*got 65"),
        ({"decode_tensor_parallel_size": "two"}, "--decode-tensor-parallel-size: .*got 'two'"),
        ({"decode_tensor_parallel_size": 2, "device": "cuda"}, "--decode-.*: 2 is above 1.*--device cuda"),
        ({"decode_tensor_parallel_size": 2, "compile": "on"}, "--decode-.*: 2 is above 1.*--compile on"),
        ({"decode_tensor_parallel_size": 2, "kv_transports": "object_store"}, "--decode-.*object_store"),
    ],
)
def test_others_are_refused_with_the_limit(model: str, flags: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config({"model": model, **flags}, {})


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"prefill_tensor_parallel_size": 5}, "--prefill-.*: 5 does not divide num_attention_heads.*, 12$"),
        ({"decode_tensor_parallel_size": 24}, "--decode-.*: 24 does not divide num_attention_heads.*, 12$"),
    ],
)
def test_sizes_must_divide_the_heads(model: str, flags: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_heads(load_config({"model": model, **flags}, {}), HEADS)


def test_gpt2_has_another_name_for_them(model: str) -> None:
    with pytest.raises(ConfigError, match=r"--decode-.*: 5 does not divide n_head of .*, 12$"):
        check_heads(load_config({"model": model, "decode_tensor_parallel_size": 5}, {}), {"n_head": 12})


def test_a_role_without_workers_needs_no_ranks(model: str) -> None:
    flags = {"model": model, "disaggregation": False, "prefill_tensor_parallel_size": 5}
    config = load_config(flags, {})
    check_heads(config, HEADS)
    assert config.total_ranks == 1
