"""The models' shapes, and how they are saved."""

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, PreTrainedModel, Qwen3_5TextConfig

VOCABULARY = 4096
CONTEXT = 1024
END_OF_TEXT_ID = 0
PAD_ID = 1


def _config(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, tied: bool
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=PAD_ID,
        dtype="bfloat16",
    )


def target_config() -> LlamaConfig:
    """Return a shape of 9.4 M parameters: 4 layers of width 384, 6 heads of 64 over 2 KV heads; untied."""
    return _config(hidden=384, layers=4, heads=6, kv_heads=2, head_dim=64, ffn=1024, tied=False)


def draft_config() -> LlamaConfig:
    """Return a shape of 1.0 M parameters: 2 layers of width 128, 4 heads of 32 over 2 KV heads; tied."""
    return _config(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=512, tied=True)


def hybrid_config() -> Qwen3_5TextConfig:
    """Return a shape of 9.6 M parameters: the target's, with 3 gated delta nets and 1 attention layer."""
    return Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=PAD_ID,
        dtype="bfloat16",
    )


def export(model: PreTrainedModel, folder: Path) -> None:
    """Write config, generation config and bf16 safetensors to `folder`, which has the tokenizer."""
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=PAD_ID
    )
    model.save_pretrained(folder)
