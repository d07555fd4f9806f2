"""llama.cpp as a peer, with scripts in place of its tools: their arguments and the parsed output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from transformers import AutoConfig, AutoModelForCausalLM

from bench.peers.llama_cpp import LlamaCpp
from bench.quantize import peers

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
# Prints JSON like llama-bench; the tokens per second encode the weights and lengths that it got.
BENCH = """
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert flags["-t"] == "1" and flags["-o"] == "json", flags
rate = {"bf16": 1.0, "q8_0": 2.0, "q4_0": 4.0}[open(flags["-m"]).read().split()[0]]
prompt, output = int(flags["-p"]), int(flags["-n"])
print(json.dumps([
    {"n_prompt": prompt, "n_gen": 0, "avg_ts": rate * prompt},
    {"n_prompt": 0, "n_gen": output, "avg_ts": rate * output},
]))
"""


@pytest.fixture
def llama(tmp_path: Path) -> LlamaCpp:
    llama = LlamaCpp(tmp_path / "llama.cpp")
    built = llama.tool("llama-server").parent
    built.mkdir(parents=True)
    for name, code in {"llama-quantize": QUANTIZE, "llama-bench": BENCH, "llama-server": ""}.items():
        (built / name).write_text(f"#!{sys.executable}\n{code}")
        (built / name).chmod(0o755)
    source = llama.home / "source"
    (source / "conversion").mkdir(parents=True)
    (source / "conversion" / "base.py").write_text("class TextModel: pass\n")
    (source / "convert_hf_to_gguf.py").write_text(CONVERT)
    return llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    config = AutoConfig.for_model("llama", **shape, num_hidden_layers=2, num_attention_heads=2)
    config.save_pretrained(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_model_is_converted_once_and_again_when_it_changes(llama: LlamaCpp, model: Path) -> None:
    made = llama.gguf(model, "q8_0")
    assert made.read_text() == f"q8_0 of bf16 of {model}"
    made.write_text("kept")
    assert llama.gguf(model, "q8_0").read_text() == "kept"
    assert llama.gguf(model, "bf16").read_text() == f"bf16 of {model}"
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    assert llama.gguf(model, "q8_0").read_text() == f"q8_0 of bf16 of {model}"


def test_each_format_is_compared_with_its_counterpart(llama: LlamaCpp, model: Path, tmp_path: Path) -> None:
    lengths = {"prompt_len": 20, "output_len": 3}
    peers.main(model, "bf16,int4", **lengths, rounds=2, threads=1, env_dir=tmp_path, output=tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert [each["format"] for each in found["measurements"]] == ["bf16", "bf16", "q4_0", "int4"] * 2
    for format, rate in {"bf16": 1, "int4": 4}.items():
        for phase, length in {"prefill": 20, "decode": 3}.items():
            each = found["medians"][format][phase]
            assert each["llama.cpp"] == rate * length
            assert each["ratio"] == pytest.approx(each["tandem"] / each["llama.cpp"])
            assert each["tandem"] > 0


def test_a_format_without_a_counterpart_is_refused(model: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"--format: 'fp8' is not one of bf16, int8, int4"):
        peers.main(model, "fp8")


def test_a_missing_build_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="llama-bench is missing"):
        peers.main(model, env_dir=tmp_path)
