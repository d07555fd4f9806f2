"""llama.cpp as a peer, with scripts in place of its tools."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.llama_cpp import LlamaCpp

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
