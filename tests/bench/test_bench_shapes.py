"""Model folders with random weights."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.shapes.tokenizer import build_tokenizer
from bench.shapes.write import SHAPES, write_shape


def test_tokenizer_has_the_exact_size_and_round_trips():
    tokenizer = build_tokenizer(600)
    assert len(tokenizer) == 600
    for text in ("def f(x):\n    return x", "größe ☃ 日本", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 0


def test_tokenizer_too_small():
    with pytest.raises(ValueError, match="257"):
        build_tokenizer(100)


@pytest.mark.parametrize(("name", "millions"), [("llama-29m", 29.4), ("qwen3-0.5b", 507.6)])
def test_parameter_counts(name, millions):
    import torch

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name], vocab_size=4096))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_written_shape_loads(tmp_path):
    write_shape("llama-29m", tmp_path)
    assert (
        AutoConfig.from_pretrained(tmp_path).vocab_size
        == len(AutoTokenizer.from_pretrained(tmp_path))
        == 4096
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert str(model.dtype) == "torch.bfloat16"


def test_unknown_shape(tmp_path):
    with pytest.raises(ValueError, match="unknown shape"):
        write_shape("llama-900b", tmp_path)
