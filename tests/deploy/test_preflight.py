"""Wrong options that can be found without Ray and torch are refused at once, by flag and limit."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from deploy import preflight, resources
from deploy.config import load_config
from deploy.preflight import check_source, check_start
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.text.tokenizer import Tokenizer
from tests.checkpoints.gguf_writer import byte_level, write_raw

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "max_position_embeddings": 2048,
    "vocab_size": 500,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "dtype": "bfloat16",
}
ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 8}
TOKEN_BYTES = 2 * 2 * 2 * 8 * 2


def write_model(folder: Path, weights: bool = True, **fields: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    if weights:
        (folder / "model.safetensors").touch()
    return str(folder)


def write_adapter(folder: Path, **fields: Any) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | fields))
    (folder / "adapter_model.safetensors").touch()
    return f"sql={folder}"


def check(model: str, **flags: Any) -> None:
    check_start(load_config({"model": model, "device": "cpu", **flags}, {}))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path / "model")


def test_fitting_options_are_accepted(model: str, tmp_path: Path) -> None:
    check(
        model,
        max_model_len=2048,
        lora_modules=[write_adapter(tmp_path / "sql")],
        decode_tensor_parallel_size=4,
        kv_cache_memory_bytes=2048 * TOKEN_BYTES,
        speculative_config={"method": "draft_model", "model": write_model(tmp_path / "draft")},
        quantization="int8",
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"max_model_len": 10_000_000}, "--max-model-len: 10000000 exceeds the model's 2048 positions$"),
        ({"lora_modules": ["sql=/nope"]}, "--lora-modules: sql: adapter_config.json: cannot be read: "),
        ({"decode_tensor_parallel_size": 3}, "--decode-.*: 3 does not divide num_attention_heads of .*, 8$"),
        ({"attention_backend": "triton"}, "--attention-backend: triton is for --device cuda, not cpu$"),
        ({"attention_backend": "flash"}, "--attention-backend: flash is for --device cuda, not cpu$"),
        ({"generation_config": "/nope"}, "--generation-config: must be auto, vllm or a folder, got /nope$"),
        (
            {"kv_disk_path": "/proc/x", "kv_disk_size": 1, "kv_offloading_size": 1},
            "--kv-disk-path: cannot use /proc/x: ",
        ),
        ({"worker_host": "192.0.2.1"}, "--worker-host: cannot listen on 192.0.2.1: "),
        ({"kv_cache_memory_bytes": 2**60}, "--kv-cache-memory-bytes: [0-9]+ are asked for, this host has "),
        ({"tokenizer": "/nope"}, "--tokenizer: there is no folder /nope$"),
        ({"model": "/nope.gguf"}, "--model: there is no file /nope.gguf$"),
        ({"model": "nope.gguf"}, r"--model: there is no file nope.gguf, and a file on the hub is owner/"),
        (
            {"kv_cache_memory_bytes": 2048 * TOKEN_BYTES - 1},
            rf"holds 2047 tokens, fewer than --max-model-len \(2048\), which needs {2048 * TOKEN_BYTES} b",
        ),
    ],
)
def test_options_beyond_the_model(model: str, flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(**{"model": model} | flags)


def test_a_gguf_file_whose_tokenizer_cannot_be_built_needs_another(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    path = str(tmp_path / "model.gguf")
    fields = {
        "context_length": 2048,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 8,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    metadata = {f"llama.{name}": value for name, value in fields.items()}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in byte_level(280, "unheard-of").items()}
    write_raw(Path(path), "llama", metadata, {})
    with pytest.raises(ConfigError, match=f"^--model: {path}: .*'unheard-of' is not known: .* --tokenizer$"):
        check(path)
    check(path, tokenizer=model)


@pytest.mark.parametrize(
    ("fields", "flags", "reason"),
    [
        (
            {"quantization_config": {"quant_method": "awq"}},
            {"quantization": "int8"},
            "--quantization: .*by awq",
        ),
        ({"is_encoder_decoder": True}, {}, "--model: .*encoder-decoder models are not supported"),
        ({"weights": False}, {}, r"--model: .* has no weights \(\*.safetensors, \*.bin\)$"),
        (
            {"max_position_embeddings": 10**8},
            {},
            r"--kv-cache-memory-bytes: .* holds \d+ tokens, fewer than --max-model-len \(100000000\)",
        ),
        (
            {"text_config": {"max_position_embeddings": 64}},
            {"max_model_len": 65},
            "--max-model-len: 65 exceeds",
        ),
        (
            {"max_position_embeddings": None, "n_positions": 64},
            {"max_model_len": 65},
            "--max-model-len: 65 ex",
        ),
        (
            {"num_attention_heads": None, "n_head": 12},
            {"decode_tensor_parallel_size": 5},
            "5 does not divide n_h",
        ),
    ],
)
def test_models_that_do_not_fit(
    tmp_path: Path, fields: dict[str, Any], flags: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(write_model(tmp_path, **fields), **flags)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vocab_size": 499}, "--speculative-config: model: the draft's vocabulary has 499 tokens, .*500"),
        ({"max_position_embeddings": 100}, "--speculative-config: model: the draft takes 100 tokens; .*2048"),
    ],
)
def test_drafts_that_do_not_fit(model: str, tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    draft = write_model(tmp_path / "draft", **fields)
    with pytest.raises(ConfigError, match=reason):
        check(model, speculative_config={"method": "draft_model", "model": draft})


def test_more_workers_than_the_host_takes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "host_cores", lambda: 2)
    check(model, prefill_replicas=2, decode_replicas=6)
    refused = "--decode-replicas: at most 8 worker processes fit on this host with 2 cores and no GPU"
    with pytest.raises(ConfigError, match=f"{refused} .4 for each core., got 10 of all roles"):
        check(model, decode_replicas=9)
    with pytest.raises(ConfigError, match=r"--decode-tensor-parallel-size: at most 8 .* got 9 of all roles"):
        check(model, decode_tensor_parallel_size=8)
    check(model, decode_replicas=9, ray_address="10.0.0.1:6379")


def test_a_limit_of_open_files_that_is_too_low(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"soft": 64, "hard": 128}
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits.values()))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.update(soft=both[0]))
    with pytest.raises(
        ConfigError, match="ulimit -n: a server needs at least 256 open files, 128 are allowed"
    ):
        check(model)
    limits["hard"] = 4096
    check(model)
    assert limits == {"soft": 1024, "hard": 4096}


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    for flags in ({}, {"speculative_config": {"method": "eagle", "model": str(tmp_path)}}):
        target = write_model(tmp_path / "model") if flags else str(tmp_path)
        with pytest.raises(ConfigError, match=f"{tmp_path} has no config.json$"):
            check(target, **flags)


def test_a_model_without_an_mtp_head(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    save_file({"model.norm.weight": np.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"its checkpoint has no MTP head: none of mtp\.fc\.weight, "):
        check(model, speculative_config={"method": "mtp", "model": model})
    head = {
        f"mtp.{name}.weight": np.ones(4)
        for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    save_file(head, tmp_path / "model.safetensors")
    check(model, speculative_config={"method": "mtp", "model": model})


def test_adapters_of_too_high_a_rank(model: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--lora-modules: sql: .*r: must be from 1 to --max-lora-rank 4, got 8"
    ):
        check(model, lora_modules=[write_adapter(tmp_path / "sql")], max_lora_rank=4)


@pytest.mark.parametrize(
    "windowed", [{"sliding_window": 64, "model_type": "mistral"}, {"model_type": "bamba"}]
)
def test_models_that_may_need_less_memory_are_left_to_the_workers(
    tmp_path: Path, windowed: dict[str, Any]
) -> None:
    check(write_model(tmp_path, **windowed), kv_cache_memory_bytes=1)


def test_cuda_without_a_gpu(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "version", lambda name: "2.13.0+cpu")
    with pytest.raises(ConfigError, match=r"--device: cuda was asked for, but PyTorch 2.13.0\+cpu is built"):
        check(model, device="cuda")
    for name in ("triton", "flash"):
        with pytest.raises(ConfigError, match=f"--attention-backend: {name} is for GPUs, but PyTorch"):
            check(model, device="auto", attention_backend=name)
    monkeypatch.setattr(resources, "version", lambda name: "2.13.0+cu128")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        ConfigError, match=r"--device: cuda was asked for, but (this host has no NVIDIA|the NVIDIA)"
    ):
        check(model, device="cuda")


def test_containers_with_a_cuda_build_do_not_fall_back_to_the_cpu(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "has_cuda_build", lambda: True)
    monkeypatch.setattr(preflight, "cuda_fault", lambda: "there is no driver")
    monkeypatch.setattr(resources, "_CONTAINER_MARKS", [tmp_path])
    with pytest.raises(ConfigError, match=r"--device: auto finds no GPU in this container.*no driver"):
        check(model, device="auto")
    check(model, device="cpu")
    monkeypatch.setattr(preflight, "has_cuda_build", lambda: False)
    check(model, device="auto")


@pytest.mark.parametrize(
    "command",
    [
        ["speculate", "train", "--method", "medusa", "--data", "x"],
        ["speculate", "choose-layers", "--data", "x"],
        ["quantize", "--method", "int8", "--output", "x"],
        ["profile"],
        ["serve"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_commands_check_the_model_without_importing_torch(command: list[str]) -> None:
    code = """if True:
        import sys
        from deploy.cli import app
        try:
            app(sys.argv[1:], standalone_mode=False)
        except BaseException as error:
            print(getattr(error, "exit_code", error))
        print("torch" in sys.modules, "ray" in sys.modules)
    """
    arguments = [*command, "--model", "/nope"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "tandem: --model: there is no folder /nope\n"
    assert done.stdout.split()[-2:] == ["False", "False"]


class Hub(HTTPServer):
    """Answers each request with the same status and counts requests."""

    status, error = 200, ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("Content-Length", "2")
        if self.server.error:
            self.send_header("X-Error-Code", self.server.error)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        url = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        monkeypatch.setattr(huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", url, raising=False)
        yield server
        server.shutdown()
        thread.join()


def test_a_model_of_the_hub(hub: Hub) -> None:
    check_source("me/model", "--model", "v1")
    assert hub.asked == ["/me/model/resolve/v1/config.json"]


@pytest.mark.parametrize("error", ["RepoNotFound", "EntryNotFound", "RevisionNotFound"])
def test_a_model_that_the_hub_does_not_have(hub: Hub, error: str) -> None:
    hub.status, hub.error = 404, error
    with pytest.raises(
        ConfigError, match="--model: 'me/model' is no folder here, and the hub does not give its"
    ):
        check_source("me/model", "--model")
    assert len(hub.asked) == 1


@pytest.mark.parametrize("status", [503, 504])
def test_an_unavailable_hub_is_asked_once(hub: Hub, status: int) -> None:
    hub.status = status
    with pytest.raises(ConfigError, match=r"--tokenizer: 'me/model' is no folder here, .* cannot be reached"):
        check_source("me/model", "--tokenizer")
    assert len(hub.asked) == 1
    assert not constants.HF_HUB_OFFLINE


def test_without_a_hub_the_cache_is_used(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    snapshot = tmp_path / "cache" / "models--me--model" / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("1" * 40)
    hub.status = 503
    for _ in range(2):
        check_source("me/model", "--model")
    assert len(hub.asked) == 1
    assert caplog.text.count("models are taken from the cache") == 1
    with pytest.raises(ConfigError, match="--model: 'me/other' is no folder here, it is not in the cache"):
        check_source("me/other", "--model")
    with pytest.raises(ConfigError, match="--model: me/model has no usable tokenizer"):
        Tokenizer.load(ServeConfig(model="me/model"))
    assert len(hub.asked) == 1
