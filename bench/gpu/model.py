"""A model with random weights in the shape of a Qwen3, made on the device, and a runner for its forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.gpu.roofline import Costs
from engine.batch.runner import Runner, Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import select_backend
from engine.devices.loaded_model import LoadedModel
from engine.devices.torch import transformers_hook
from engine.kv.layout import PoolLayout
from engine.kv.pool import KVPool
from engine.load.loader import keep_preloaded
from engine.load.probe import probe
from engine.load.select import pack_model, runner_of_one_process
from protocol.config import ServeConfig

BLOCK_SIZE = 16
_VOCABULARY = 151936
_DEFAULT = ServeConfig()


@dataclass(frozen=True)
class DecoderShape:
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = _VOCABULARY

    def nbytes(self, num_tokens: int) -> int:
        """Return the bytes of the weights and of the KV of `num_tokens` tokens."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.mlp
        kv = 2 * self.layers * self.kv_heads * self.head_dim
        numbers = self.layers * layer + 2 * self.vocabulary * self.hidden + num_tokens * kv
        return numbers * torch.bfloat16.itemsize

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            tie_word_embeddings=False,
            dtype="bfloat16",
        )


SHAPES = {
    "0.6B": DecoderShape(28, 1024, 3072, 16),
    "1.7B": DecoderShape(28, 2048, 6144, 16),
    "4B": DecoderShape(36, 2560, 9728, 32),
    "8B": DecoderShape(36, 4096, 12288, 32),
    "14B": DecoderShape(40, 5120, 17408, 40),
    "32B": DecoderShape(64, 5120, 25600, 64),
}


class MadeUpModel:
    """A model with random weights for sequences of up to `max_len` tokens. Its configuration is saved in
    `folder`, from which an engine reads it.
    """

    def __init__(self, shape: DecoderShape, device: torch.device, folder: Path, max_len: int) -> None:
        config = shape.config()
        config.save_pretrained(folder)
        transformers_hook.register()
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=transformers_hook.NAME
            )
        model.eval().requires_grad_(False)
        group = probe(model, torch.bfloat16, shape.layers).kv
        self.costs = Costs.of(model, group.num_values * torch.bfloat16.itemsize)
        self.device, self.shape = device, shape
        loaded = LoadedModel(model, device, torch.bfloat16, group, shape.vocabulary, max_len, [], "00")
        backend, _ = select_backend(device, torch.bfloat16)
        self._loaded = pack_model(loaded, "auto", backend)
        self._folder = folder
        self._max_len = max_len

    def config(self, max_num_seqs: int, context: int) -> ServeConfig:
        """Return the configuration of an engine with room for `max_num_seqs` sequences. The next engine made
        from it gets this model.
        """
        tokens = 2 * BLOCK_SIZE + max(max_num_seqs * (context + BLOCK_SIZE), self._max_len)
        config = ServeConfig(
            model=str(self._folder),
            device=self.device.type,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=tokens * self.costs.kv_bytes,
            enable_prefix_caching=False,
        )
        keep_preloaded([(config, self._loaded)])
        return config

    def forwards(self, num_tokens: int, config: ServeConfig = _DEFAULT) -> Forwards:
        """Return a runner of forwards with a pool of `num_tokens` tokens."""
        return Forwards(self._loaded, num_tokens, config)


class Forwards:
    def __init__(self, loaded: LoadedModel, num_tokens: int, config: ServeConfig) -> None:
        self._loaded = loaded
        self.num_blocks = -(-num_tokens // BLOCK_SIZE)
        layout = PoolLayout((loaded.kv_group,), BLOCK_SIZE)
        pool = KVPool(layout, self.num_blocks, loaded.device, None)
        self._runner: Runner = runner_of_one_process(config, loaded, pool, ())
        self._runner.warm_up()

    @property
    def choice(self) -> str:
        return self._runner.choice

    def batch(self, contexts: Sequence[int], rows_each: int) -> list[SequenceRows]:
        """Return the last `rows_each` rows of sequences of these lengths, in scattered blocks."""
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        batch, taken = [], 0
        for number, context in enumerate(contexts):
            blocks = order[taken : taken - (-context // BLOCK_SIZE)]
            taken += len(blocks)
            token_ids = [1 + (number + row) % 100 for row in range(rows_each)]
            batch.append(SequenceRows(token_ids, context - rows_each, [blocks]))
        return batch

    def run(self, batch: Sequence[SequenceRows], logits_each: int) -> None:
        rows_each = len(batch[0].token_ids)
        wanted = [
            number * rows_each + row
            for number in range(len(batch))
            for row in range(rows_each - logits_each, rows_each)
        ]
        self._runner.run(Step(batch, wanted))
