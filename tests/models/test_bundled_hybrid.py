"""The bundled hybrid: small, with the pair's tokenizer and a bundled draft, and it knows Python."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
)

from deploy.config import load_config
from models.training.hybridize import begin
from models.training.shapes import hybrid_config
from protocol.errors import ConfigError

MODELS = Path(__file__).parents[2] / "models"
HYBRID = MODELS / "tandem-code-10m-hybrid"


def test_it_is_small_and_has_the_tokenizer_of_the_pair() -> None:
    config = json.loads((HYBRID / "config.json").read_text())
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert (HYBRID / "model.safetensors").stat().st_size < 21_000_000
    assert (HYBRID / "tokenizer.json").read_bytes() == (
        MODELS / "tandem-code-10m" / "tokenizer.json"
    ).read_bytes()


def test_held_out_bits_per_byte() -> None:
    tokenizer = AutoTokenizer.from_pretrained(HYBRID)
    model = AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.float32).eval()
    nats = size = 0.0
    for line in (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()[::16]:
        entry = json.loads(line)
        text = entry["prompt"] + entry["continuation"]
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text).input_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids[:, :-1]).logits[0]
        nats += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        size += len(text.encode())
    assert nats / math.log(2) / size < 1.5


def test_the_draft_of_the_pair_drafts_for_it() -> None:
    flags = {"model": HYBRID.name, "speculative_config": '{"method": "draft_model"}'}
    config = load_config(flags, {}).speculative_config
    assert config is not None
    assert config.model == str(MODELS / "tandem-code-1m")
    with pytest.raises(ConfigError, match="model: the method eagle needs one"):
        load_config(flags | {"speculative_config": '{"method": "eagle"}'}, {})


def test_it_begins_with_what_the_target_knows() -> None:
    """Of one token, whose attention depends on no norm of queries and keys."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    config = hybrid_config()
    config.update(sizes | heads | {"layer_types": ["linear_attention", "full_attention"], "dtype": "float32"})
    hybrid = Qwen3_5ForCausalLM(config).eval()
    begin(target, hybrid)
    target.model.layers[0].self_attn.o_proj.weight.data.zero_()  # the delta net in its place adds nothing
    token = torch.tensor([[7]])
    with torch.no_grad():
        expected, found = (model(input_ids=token).logits for model in (target, hybrid))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
