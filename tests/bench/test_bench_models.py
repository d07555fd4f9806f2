"""Models of the benchmarks: shapes that are written with random weights, and conversion for llama.cpp."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.peers.llama_cpp import LlamaCpp
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


CONVERT = """
import sys
from conversion import base
model, *flags = sys.argv[1:]
assert flags[:3] == ["--outtype", "bf16", "--outfile"], flags
assert base.TextModel().get_vocab_base_pre(None) == "gpt-2"
open(flags[3], "w").write("bf16 of " + model)
"""
QUANTIZE = """
import sys
source, target, type = sys.argv[1:]
open(target, "w").write(type + " of " + open(source).read())
"""


def test_a_model_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    llama, model = LlamaCpp(tmp_path / "llama.cpp"), tmp_path / "model"
    tool, source = llama.tool("llama-quantize"), llama.home / "source"
    tool.parent.mkdir(parents=True)
    tool.write_text(f"#!{sys.executable}\n{QUANTIZE}")
    tool.chmod(0o755)
    (source / "conversion").mkdir(parents=True)
    (source / "conversion" / "base.py").write_text("class TextModel: pass\n")
    (source / "convert_hf_to_gguf.py").write_text(CONVERT)
    model.mkdir()
    (model / "config.json").write_text("{}")
    made = llama.gguf(model, "q8_0")
    assert made.read_text() == f"q8_0 of bf16 of {model}"
    made.write_text("kept")
    assert llama.gguf(model, "q8_0").read_text() == "kept"
    assert llama.gguf(model, "bf16").read_text() == f"bf16 of {model}"
    (model / "config.json").write_text("{} ")
    assert llama.gguf(model, "q8_0").read_text() == f"q8_0 of bf16 of {model}"
