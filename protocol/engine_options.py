"""Options of the model and its engine. Names follow vLLM's where vLLM has the option."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from protocol.fields import PositiveInt, listed
from protocol.kv_events import KvEventsConfig
from protocol.speculation import CheckpointFormat, Quantization, SpeculativeConfig

DEFAULT_MODEL = "tandem-code-10m"
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its files and how they are read, its data types, and its formats of chats and tools."""

    model: str = DEFAULT_MODEL
    """Local folder, GGUF file, bundled name or hub id of a decoder model."""
    gguf_file: str | None = None
    """GGUF file in the model's folder or hub repository."""
    served_model_name: str | None = None
    """Names of the model in the API, comma-separated; answers and metrics have the first. Default: the
    model's own.
    """
    tokenizer: str | None = None
    """Local folder or hub id; default: the model's."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    download_dir: str | None = None
    """Folder for files from the hub, on every host; default: HF_HUB_CACHE."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights."""
    chat_template: str | None = None
    """File with a Jinja chat template."""
    default_chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template for requests that do not set them, as in '{"enable_thinking": false}':
    at most 4096 bytes of JSON.
    """
    generation_config: str = "auto"
    """Defaults of sampling parameters: those of the model's generation_config.json (`auto`), of a folder with
    such a file, or no model's (`vllm`).
    """
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Seed of requests without one: equal requests get equal answers. Default: a new one for each."""
    tool_call_parser: Literal[
        "auto", "none", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "gemma4", "glm45",
        "glm47", "granite", "hermes", "hunyuan_a13b", "hy_v3", "internlm", "kimi_k2", "llama3_json",
        "llama4_pythonic", "mimo", "minimax_m2", "mistral", "openai", "phi4_mini_json", "pythonic",
        "qwen3_coder", "qwen3_xml", "step3p5", "xlam",
    ] = "auto"  # fmt: skip
    """Format of the model's tool calls; `auto` detects it from the chat template."""
    reasoning_parser: Literal[
        "auto", "none", "deepseek_r1", "qwen3", "gemma4", "granite", "hunyuan_a13b", "hy_v3", "mistral",
        "openai_gptoss",
    ] = "auto"  # fmt: skip
    """Format of the model's reasoning; `none` leaves it in the content."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that the model runs on."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` makes random weights of the configured shape."""
    quantization: Literal[Quantization, CheckpointFormat] | None = None
    """Round the weights of linear layers at load: int8, int4 (in groups of 128), fp8 or mxfp4; the head stays
    as it is. A quantized checkpoint needs no option; any other format is refused.
    """
    quantize_lm_head: bool = False
    """Round the output head's weights to int8 at load, and a draft model's; embeddings stay."""
    enable_lora: bool = False
    """Serve LoRA adapters: those of --lora-modules, and those loaded while the server runs."""
    lora_modules: dict[str, str] | None = None
    """Name and folder of a LoRA adapter, as in sql=/adapters/sql; may be repeated."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=1024)] = 64
    """Highest rank of a LoRA adapter."""
    max_model_len: Annotated[int, Meta(ge=2, le=MAX_TOKENS)] | None = None
    """Longest sequence, prompt and output; default: the model's."""

    @property
    def serves_adapters(self) -> bool:
        return self.enable_lora or bool(self.lora_modules)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in the API. Answers and metrics have the first."""
        names = tuple(dict.fromkeys(listed(self.served_model_name)))
        if names:
            return names
        name = os.path.basename(os.path.abspath(self.model)) if Path(self.model).exists() else self.model
        return (name.removesuffix(".gguf"),)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def tokenizer_source(self) -> str:
        return self.tokenizer or self.model


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """The KV pool, its lower tiers and the prefix cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens in a KV block."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prefixes."""
    paged_kv: bool = True
    """Give a request KV blocks as it grows. If off, each request holds the blocks of --max-model-len tokens,
    as in servers without paging; for comparisons.
    """
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for the workers on it (on a CPU: of the free memory, half of it for KV)."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """KV pool size per worker. By default a GPU's share, less the weights; on a CPU room for --max-num-seqs
    sequences of --max-model-len tokens, at most 4 GiB and half of the free memory.
    """
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Format of KV in the pool: `auto` is the model's; `int8` and `fp8` take one byte a value, so nearly
    twice as many tokens fit. All workers need the same.
    """
    kv_offloading_size: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """GiB of host memory per worker for blocks evicted from the pool."""
    kv_disk_path: str | None = None
    """Folder for blocks evicted from host memory; each worker uses a subfolder."""
    kv_disk_size: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    """GiB that each worker may use of --kv-disk-path."""
    kv_events_config: KvEventsConfig | None = None
    """Publish the prefix caches' contents to other routers, unencrypted: JSON, as in '{"endpoint":
    "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}'.
    """


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The steps of an engine and the kernels that compute them."""

    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    """Tokens in one step; default: 2048 on a GPU, 512 on a CPU."""
    itl_budget: Annotated[float, Meta(ge=0, le=3600)] = 0.02
    """Longest step, in seconds, that computes part of a prompt while other requests decode; 0: no limit. Also
    limited to 0.8 of --slo-tpot and of those requests' x-slo-tpot-ms.
    """
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 128
    """Sequences in one step."""
    attention_backend: Literal["auto", "cpu", "triton", "flash", "sdpa", "torch"] = "auto"
    """Attention kernels; `triton` needs CUDA. `sdpa` computes chunks of prompts by torch's
    `scaled_dot_product_attention`, `flash` by FlashAttention-3 on a GPU, and other rows by the device's
    kernel. `torch`: all by torch.
    """
    compile: Literal["auto", "on", "off"] = "auto"
    """`on`: torch.compile; `auto`: the native decoder for models that it supports, else torch.compile."""
    deterministic: bool = False
    """On a GPU, multiply in tiles of a fixed size, so that a row has the same bits in every batch. Models and
    options that prevent this are refused. On a CPU in bfloat16 a row always has the same bits.
    """
    enforce_eager: bool = False
    """Launch each step's kernels on a GPU one by one, without CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Drafting."""

    speculative_config: SpeculativeConfig | None = None
    """Draft tokens ahead: JSON with a method and its options, as in '{"method": "ngram"}'. The default
    is `suffix` on CPUs; '{"method": "none"}' turns it off.
    """
    draft_placement: Literal["cost", "none", "local", "remote"] = "cost"
    """Place where drafts are made, unless a request says otherwise: `none`, on decode workers (`local`), on
    draft workers (`remote`), or wherever it brings most (`cost`).
    """
