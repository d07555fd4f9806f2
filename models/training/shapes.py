"""The two models' shapes, and how they are saved."""

from pathlib import Path

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

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
    """9.4 M parameters: 4 layers of width 384, 6 heads of 64 over 2 KV heads; head not tied."""
    return _config(hidden=384, layers=4, heads=6, kv_heads=2, head_dim=64, ffn=1024, tied=False)


def draft_config() -> LlamaConfig:
    """1.0 M parameters: 2 layers of width 128, 4 heads of 32 over 2 KV heads; embeddings tied."""
    return _config(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=512, tied=True)


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config, generation config and bf16 safetensors beside the tokenizer in `folder`."""
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=PAD_ID
    )
    model.save_pretrained(folder)
