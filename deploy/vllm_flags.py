"""vLLM's flags that Tandem spells differently, does not need or does not have.

Pure data, which `deploy/spellings.py` reads.

In `NEEDLESS` and `REFUSED` a flag ends with `=` if it takes a value, and with `=+` if it takes several.
A flag with a dot is a field of a JSON option.
"""

from __future__ import annotations

from collections.abc import Mapping

SHORT: Mapping[str, str] = {
    "-ac": "attention-config",
    "-asc": "api-server-count",
    "-cc": "compilation-config",
    "-dcp": "decode-context-parallel-size",
    "-dp": "data-parallel-size",
    "-dpa": "data-parallel-address",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpl": "data-parallel-size-local",
    "-dpn": "data-parallel-rank",
    "-dpp": "data-parallel-rpc-port",
    "-dpr": "data-parallel-start-rank",
    "-ep": "enable-expert-parallel",
    "-n": "nnodes",
    "-pcp": "prefill-context-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-q": "quantization",
    "-r": "node-rank",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
}

RENAMED: Mapping[str, tuple[str, ...]] = {
    "api-server-count": ("router-replicas",),
    "data-parallel-size": ("decode-replicas",),
    "ngram-prompt-lookup-max": ("speculative-config.prompt_lookup_max",),
    "ngram-prompt-lookup-min": ("speculative-config.prompt_lookup_min",),
    "num-speculative-tokens": ("speculative-config.num_speculative_tokens",),
    "spec-method": ("speculative-config.method",),
    "spec-model": ("speculative-config.model",),
    "spec-tokens": ("speculative-config.num_speculative_tokens",),
    "speculative-model": ("speculative-config.model",),
    "ssl-certfile": ("tls-cert",),
    "ssl-keyfile": ("tls-key",),
    "tensor-parallel-size": ("prefill-tensor-parallel-size", "decode-tensor-parallel-size"),
}
"""vLLM's flags that have the same meaning under other names here."""

LISTS = ("allowed-origins", "api-key", "served-model-name")
"""Flags with several values, which Tandem separates by commas."""

VALUES: Mapping[str, Mapping[str, str | None]] = {
    "attention-backend": {
        "CPU_ATTN": "cpu",
        "TORCH_SDPA": "sdpa",
        "TRITON_*": "triton",
        **dict.fromkeys(("CUTLASS*", "FLASH*", "FLEX*", "ROCM*", "TREE*", "XFORMERS"), "auto"),
    },
    "dtype": {"float": "float32", "half": "float16"},
    "kv-cache-dtype": {
        "bfloat16": "auto",
        "float16": "auto",
        **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_per_token_head"), "fp8"),
        "int8_per_token_head": "int8",
    },
    "load-format": dict.fromkeys(
        ("fastsafetensors", "gguf", "hf", "instanttensor", "npcache", "pt", "runai_streamer", "safetensors"),
        "auto",
    ),
    "max-model-len": dict.fromkeys(("-1", "auto"), None),
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq", "gguf": None, "None": None},
    "reasoning-parser": {
        **dict.fromkeys(("deepseek_v3", "deepseek_v4", "ernie45", "glm45", "kimi_k2", "minimax_m2"), "auto"),
        **dict.fromkeys(("nemotron_v3", "olmo3", "seed_oss", "step3", "step3p5"), "auto"),
        "minimax_m2_append_think": "none",
    },
    "speculative-config.method": {"ngram_gpu": "ngram"},
    "tool-call-parser": {"llama4_json": "llama3_json"},
}
"""The names here of vLLM's values, or of patterns of values. None: what Tandem does without the flag."""

NEEDLESS: Mapping[str, str] = {
    "prompts are always computed in chunks, bounded by --max-num-batched-tokens and --itl-budget": """
        enable-chunked-prefill disable-chunked-mm-input long-prefill-token-threshold=
        max-long-partial-prefills= max-num-partial-prefills=""",
    "tool calls are parsed wherever the chat template's format is known": "enable-auto-tool-choice",
    "a preempted request is computed again; --kv-offloading-size keeps prefixes in host memory": """
        preemption-mode= swap-space=""",
    "--compile and --enforce-eager say how steps run": """
        compilation-config= cuda-graph-sizes=+ cudagraph-capture-sizes=+ max-context-len-to-capture=
        max-cudagraph-capture-size= max-seq-len-to-capture= optimization-level= performance-mode=""",
    "the device chooses the kernels": """
        all2all-backend= attention-config= disable-cascade-attn disable-custom-all-reduce
        enable-flashinfer-autotune gdn-prefill-backend= ir-op-priority= kda-prefill-backend= kernel-config=
        linear-backend= mamba-backend= mamba-cache-mode= mamba-cache-dtype= mamba-ssm-cache-dtype=
        moe-backend= kv-sharing-fast-prefill""",
    "each worker, or with --tensor-parallel-size each rank, computes its share of all experts": """
        dbo-decode-token-threshold= dbo-prefill-token-threshold= enable-dbo enable-ep-weight-filter
        enable-eplb enable-expert-parallel eplb-config= expert-placement-strategy=""",
    "the scheduler does this by itself": """
        async-scheduling disable-async-output-proc disable-hybrid-kv-cache-manager
        max-num-scheduled-tokens= multi-step-stream-outputs
        num-lookahead-slots= num-scheduler-steps= prefill-schedule-interval= scheduler-delay-factor=
        scheduler-reserve-full-isl stream-interval= use-v2-block-manager watermark=""",
    "a request's priority always counts; then API keys, else addresses, take turns": "scheduling-policy=",
    "prompts and answers are never logged; --enable-log-requests logs a line for each finished request": """
        aggregate-engine-logging disable-access-log-for-endpoints= disable-log-requests disable-log-stats
        disable-uvicorn-access-log max-log-len= uvicorn-log-level=""",
    "always so": "enable-offline-docs enable-prompt-tokens-details enable-request-id-headers",
    "/metrics and --otlp-traces-endpoint show what there is": """
        collect-detailed-traces= cudagraph-metrics enable-logging-iteration-details enable-mfu-metrics
        kv-cache-metrics kv-cache-metrics-sample= show-hidden-metrics-for-version=""",
    "models read text alone; requests with images or audio get a 400": """
        allowed-local-media-path= allowed-media-domains=+ disable-mm-preprocessor-cache
        interleave-mm-strings language-model-only limit-mm-per-prompt= media-io-kwargs=
        mm-encoder-attn-backend= mm-encoder-tp-mode= mm-processor-cache-gb= mm-processor-cache-type=
        mm-processor-kwargs= skip-mm-profiling video-pruning-rate=""",
    "any number of adapters may be loaded, up to --max-lora-rank": """
        fully-sharded-loras lora-dtype= lora-extra-vocab-size= max-cpu-loras= max-loras=
        specialize-active-lora""",
    "Ray places worker processes, and idle ones lend their cores (--worker-threads)": """
        disable-frontend-multiprocessing distributed-executor-backend= distributed-timeout-seconds=
        engine-use-ray max-parallel-loading-workers= numa-bind numa-bind-cpus=+ numa-bind-nodes=+
        ray-workers-use-nsight renderer-num-workers= worker-use-ray""",
    "weights are mapped from the checkpoint's files": """
        model-loader-extra-config= pt-load-map-location= safetensors-load-strategy= use-tqdm-on-load""",
    "known families run natively, others by Transformers": "model-impl=",
    "grammars have one backend": "guided-decoding-backend= structured-outputs-config=",
    "the chat template's own format is found": "chat-template-content-format=",
    "prefixes have BLAKE2b hashes": "prefix-caching-hash-algo=",
    "each row of KV has scales of its own": "calculate-kv-scales quantization-param-path=",
    "pages of --allowed-origins may use every method and header": """
        allow-credentials allowed-headers= allowed-methods=""",
    "--max-body-bytes and fixed limits bound requests": """
        h11-max-header-count= h11-max-incomplete-event-size=""",
    "drafts run on the worker's own device or cores": """
        speculative-config.attention_backend= speculative-config.draft_tensor_parallel_size=
        speculative-config.enforce_eager= speculative-config.moe_backend=
        speculative-config.parallel_drafting= speculative-config.disable_padded_drafter_batch=
        speculative-config.use_local_argmax_reduction= speculative-draft-tensor-parallel-size=
        speculative-disable-mqa-scorer""",
    '"verification" says how drafts are sampled': "speculative-config.draft_sample_method=",
    'num_speculative_tokens "auto" drafts only where that pays': """
        speculative-config.disable_by_batch_size= speculative-disable-by-batch-size=""",
}
"""Flags that need no counterpart, by the line that says why."""

REFUSED: Mapping[str, str] = {
    "leave it out: a server's prefill and decode workers hand KV over by themselves (--kv-transports); "
    "--no-disaggregation has one kind of worker, --kv-offloading-size keeps prefixes in host memory": """
        ec-transfer-config= kv-transfer-config=""",
    "a model's layers are not spread over devices; write --tensor-parallel-size": """
        decode-context-parallel-size= pipeline-parallel-size= prefill-context-parallel-size=""",
    "one server has all hosts: write --ray-address and --min-nodes, and --decode-replicas": """
        data-parallel-address= data-parallel-backend= data-parallel-external-lb data-parallel-hybrid-lb
        data-parallel-rank= data-parallel-rpc-port= data-parallel-size-local= data-parallel-start-rank=
        headless master-addr= master-port= nnodes= node-rank=""",
    "leave it out, and change the config.json in a local copy of the model": """
        disable-sliding-window hf-config-path= hf-overrides= model-class-overrides= rope-scaling=
        rope-theta=""",
    "write the values in a generation_config.json, and its folder in --generation-config": """
        override-generation-config=""",
    "leave it out: the model's config.json and tokenizer.json in Hugging Face's format are read": """
        config-format= tokenizer-mode=""",
    "write --enable-embeddings for embeddings, scores and ranks": """
        convert= override-pooler-config= pooler-config= runner= task=""",
    "leave it out: --revision holds for the tokenizer and the code, too": """
        code-revision= tokenizer-revision=""",
    "set HF_TOKEN in the environment": "hf-token=",
    "leave it out: only drafters and placement policies may be your own (docs/speculation.md)": """
        io-processor-plugin= logits-processor-pattern= logits-processors=+ middleware=
        reasoning-parser-plugin= scheduler-cls= tool-parser-plugin= worker-cls= worker-extension-cls=""",
    "leave it out: clients run tools": "tool-server=",
    "write --host and --port": "uds=",
    "leave it out: clients have API keys (--api-key-file), no certificates": "ssl-ca-certs= ssl-cert-reqs=",
    "leave it out: TLS is 1.2 or later, and renewed files take a restart": "enable-ssl-refresh ssl-ciphers=",
    "write --kv-cache-memory-bytes": "num-gpu-blocks-override=",
    "leave it out: weights stay on the device; --quantization int8 or int4 makes them smaller": """
        cpu-offload-gb= cpu-offload-params=+ offload-backend= offload-group-size= offload-num-in-group=
        offload-params=+ offload-prefetch-step=""",
    "leave it out: /score, /v1/embeddings and generation take text or token ids": "enable-prompt-embeds",
    "write --max-queued-requests, which counts running requests, too": """
        max-num-queued-reqs= max-num-queued-tokens=""",
    "leave it out: `tandem scale` ends and starts workers": "enable-sleep-mode",
    "leave it out: requests and answers need the tokenizer": "skip-tokenizer-init tokens-only",
    "write --log-level and --log-format": "log-config-file=",
    "leave it out: answers are never logged": "enable-log-outputs",
    "leave it out: write stream_options.include_usage in each request": "enable-force-include-usage",
    "leave it out: write return_token_ids in each request": "return-tokens-as-token-ids",
    "leave it out: answers have the role assistant": "response-role=",
    "leave it out: requests cannot bring a chat template": "trust-request-chat-template",
    "leave it out: /docs and /openapi.json tell only of endpoints": "disable-fastapi-docs",
    "write --lora-modules": "enable-prompt-adapter prompt-adapters=+ qlora-adapter-name-or-path=",
    "leave it out: `tandem doctor` and a request's return_timing say where time goes": """
        enable-layerwise-nvtx-tracing profiler-config=""",
    'write "verification" in --speculative-config': "spec-decoding-acceptance-method=",
}
"""Flags that ask for something that Tandem does not do, by the line that says what to write instead."""

HARMLESS: Mapping[str, tuple[str, ...]] = {
    "config-format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "cpu-offload-gb": ("0",),
    "data-parallel-backend": ("mp", "ray"),
    "decode-context-parallel-size": ("1",),
    "nnodes": ("1",),
    "node-rank": ("0",),
    "pipeline-parallel-size": ("1",),
    "prefill-context-parallel-size": ("1",),
    "response-role": ("assistant",),
    "runner": ("auto", "generate"),
    "ssl-cert-reqs": ("0",),
    "task": ("auto", "generate"),
    "tokenizer-mode": ("auto", "hf", "slow"),
    "worker-cls": ("auto",),
}
"""Values with which a refused flag asks for nothing, so it is accepted."""
