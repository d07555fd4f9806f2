"""Options of the model and its engine. Names follow vLLM's where vLLM has the option."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from protocol.fields import PositiveInt, doc, listed
from protocol.kv_events import KvEventsConfig
from protocol.speculation import CheckpointFormat, Quantization, SpeculativeConfig

DEFAULT_MODEL = "tandem-code-10m"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its files and how they are read, its data types, and its formats of chats and tools."""

    model: Annotated[str, doc("Local folder, GGUF file, bundled name or hub id of a decoder model.")] = (
        DEFAULT_MODEL
    )
    gguf_file: Annotated[str | None, doc("GGUF file in the model's folder or hub repository.")] = None
    served_model_name: Annotated[
        str | None,
        doc(
            "Names of the model in the API, comma-separated; answers and metrics have the first. "
            "Default: the model's own."
        ),
    ] = None
    tokenizer: Annotated[str | None, doc("Local folder or hub id; default: the model's.")] = None
    revision: Annotated[str | None, doc("Branch, tag or commit on the hub.")] = None
    download_dir: Annotated[
        str | None, doc("Folder for files from the hub, on every host; default: HF_HUB_CACHE.")
    ] = None
    trust_remote_code: Annotated[bool, doc("Run model code that comes with the weights.")] = False
    chat_template: Annotated[str | None, doc("File with a Jinja chat template.")] = None
    generation_config: Annotated[
        str,
        doc(
            "Defaults of sampling parameters: those of the model's generation_config.json (`auto`), of a "
            "folder with such a file, or no model's (`vllm`)."
        ),
    ] = "auto"
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
        doc("Seed of requests without one: equal requests get equal answers. Default: a new one for each."),
    ] = None
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "gemma4",
            "glm45",
            "glm47",
            "granite",
            "hermes",
            "hunyuan_a13b",
            "hy_v3",
            "internlm",
            "kimi_k2",
            "llama3_json",
            "llama4_pythonic",
            "mimo",
            "minimax_m2",
            "mistral",
            "openai",
            "phi4_mini_json",
            "pythonic",
            "qwen3_coder",
            "qwen3_xml",
            "step3p5",
            "xlam",
        ],
        doc("Format of the model's tool calls; `auto` detects it from the chat template."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal[
            "auto",
            "none",
            "deepseek_r1",
            "qwen3",
            "gemma4",
            "granite",
            "hunyuan_a13b",
            "hy_v3",
            "mistral",
            "openai_gptoss",
        ],
        doc("Format of the model's reasoning; `none` leaves it in the content."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], doc("Data type of weights and activations.")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], doc("Device that the model runs on.")] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], doc("`dummy` makes random weights of the configured shape.")
    ] = "auto"
    quantization: Annotated[
        Literal[Quantization, CheckpointFormat] | None,
        doc(
            "Round the weights of linear layers at load: int8, int4 (in groups of 128), fp8 or mxfp4; the "
            "head stays as it is. A quantized checkpoint needs no option; any other format is refused."
        ),
    ] = None
    quantize_lm_head: Annotated[
        bool, doc("Round the output head's weights to int8 at load, and a draft model's; embeddings stay.")
    ] = False
    enable_lora: Annotated[
        bool, doc("Serve LoRA adapters: those of --lora-modules, and those loaded while the server runs.")
    ] = False
    lora_modules: Annotated[
        dict[str, str] | None,
        doc("Name and folder of a LoRA adapter, as in sql=/adapters/sql; may be repeated."),
    ] = None
    max_lora_rank: Annotated[int, Meta(ge=1, le=1024), doc("Highest rank of a LoRA adapter.")] = 64
    max_model_len: Annotated[
        PositiveInt | None, doc("Longest sequence, prompt and output; default: the model's.")
    ] = None

    @property
    def serves_adapters(self) -> bool:
        return self.enable_lora or bool(self.lora_modules)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in the API. Answers and metrics have the first."""
        given = listed(self.served_model_name)
        if given:
            return given
        name = Path(self.model).name if Path(self.model).exists() else self.model
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

    block_size: Annotated[int, Meta(ge=1, le=1024), doc("Tokens in a KV block.")] = 16
    enable_prefix_caching: Annotated[bool, doc("Share the KV of equal prefixes.")] = True
    paged_kv: Annotated[
        bool,
        doc(
            "Give a request KV blocks as it grows. If off, each request holds the blocks of --max-model-len "
            "tokens, as in servers without paging; for comparisons."
        ),
    ] = True
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        doc(
            "Share of a GPU's memory for the workers on it (on a CPU: of the free memory, half of it for KV)."
        ),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        PositiveInt | None,
        doc(
            "KV pool size per worker. By default a GPU's share, less the weights; on a CPU room for "
            "--max-num-seqs sequences of --max-model-len tokens, at most 4 GiB and half of the free memory."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        doc(
            "Format of KV in the pool: `auto` is the model's; `int8` and `fp8` take one byte a value, so "
            "nearly twice as many tokens fit. All workers need the same."
        ),
    ] = "auto"
    kv_offloading_size: Annotated[
        float,
        Meta(ge=0, le=1_000_000),
        doc("GiB of host memory per worker for blocks evicted from the pool."),
    ] = 0.0
    kv_disk_path: Annotated[
        str | None, doc("Folder for blocks evicted from host memory; each worker uses a subfolder.")
    ] = None
    kv_disk_size: Annotated[
        float, Meta(ge=0, le=1_000_000), doc("GiB that each worker may use of --kv-disk-path.")
    ] = 0.0
    kv_events_config: Annotated[
        KvEventsConfig | None,
        doc(
            "Publish the prefix caches' contents to other routers, unencrypted: JSON, as in "
            '\'{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}\'.'
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The steps of an engine and the kernels that compute them."""

    max_num_batched_tokens: Annotated[
        PositiveInt | None, doc("Tokens in one step; default: 2048 on a GPU, 512 on a CPU.")
    ] = None
    itl_budget: Annotated[
        float,
        Meta(ge=0, le=3600),
        doc(
            "Longest step, in seconds, that computes part of a prompt while other requests decode; 0: no "
            "limit. Also limited to 0.8 of --slo-tpot and of those requests' x-slo-tpot-ms."
        ),
    ] = 0.02
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096), doc("Sequences in one step.")] = 128
    attention_backend: Annotated[
        Literal["auto", "cpu", "triton", "sdpa", "torch"],
        doc(
            "Attention kernels; `triton` needs CUDA. `sdpa` computes chunks of prompts by torch's "
            "`scaled_dot_product_attention`, other rows by the device's kernel. `torch`: all by torch."
        ),
    ] = "auto"
    compile: Annotated[
        Literal["auto", "on", "off"],
        doc(
            "`on`: torch.compile; `auto`: the native decoder for models that it supports, else torch.compile."
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        doc(
            "On a GPU, multiply in tiles of a fixed size, so that a row has the same bits in every batch "
            "(except with experts or adapters). On a CPU in bfloat16 it always has."
        ),
    ] = False
    enforce_eager: Annotated[
        bool, doc("Launch each step's kernels on a GPU one by one, without CUDA graphs.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Drafting."""

    speculative_config: Annotated[
        SpeculativeConfig | None,
        doc('Draft tokens ahead: JSON with a method and its options, as in \'{"method": "ngram"}\'.'),
    ] = None
    draft_placement: Annotated[
        Literal["cost", "none", "local", "remote"],
        doc(
            "Where drafts are made, unless a request says otherwise: `none`, on decode workers (`local`), on "
            "draft workers (`remote`), or wherever it brings most (`cost`)."
        ),
    ] = "cost"
