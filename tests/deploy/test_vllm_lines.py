"""Public command lines of vLLM start here, or are answered by the line that says what to write instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy import serve as server
from deploy.cli import app
from deploy.preflight import check_start
from deploy.spellings import rewrite
from deploy.vllm_flags import NEEDLESS, REFUSED, RENAMED, VALUES
from protocol.config import ServeConfig, field_types
from protocol.errors import ConfigError
from tests.deploy.test_preflight import write_adapter, write_model

BLOCKS = (Path(__file__).parent / "vllm_lines.txt").read_text().split("\n\n")[1:]
EAGLE = '{"model":"DRAFT","num_speculative_tokens":3,"method":"eagle3","draft_tensor_parallel_size":1}'
HOPPER = "no-enable-prefix-caching: true\nmax-cudagraph-capture-size: 2048\nmax-num-batched-tokens: 8192\n"
YAML = {
    "GPT-OSS_Hopper.yaml": f"{HOPPER}stream-interval: 20\n",
    "GPT-OSS_EAGLE3_Blackwell.yaml": f"{HOPPER}kv-cache-dtype: fp8\nstream-interval: 20\n"
    f"speculative-config: '{EAGLE}'\n",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write the models and files that the lines name. Return their paths by the words in the lines."""
    folder = tmp_path_factory.mktemp("lines")

    def model(name: str, **fields: Any) -> str:
        return write_model(folder / name, max_position_embeddings=262144, **fields)

    adapter = folder / "adapter"
    write_adapter(adapter)
    (folder / "file").touch()
    found = {"DRAFT": model("draft"), "AWQ": model("awq", quantization_config={"quant_method": "awq"})}
    found |= {"MODEL": model("model"), "ADAPTER": str(adapter), "FILE": str(folder / "file")}
    for name, text in YAML.items():
        (folder / name).write_text(text.replace("DRAFT", found["DRAFT"]))
        (folder / name).chmod(0o600)
        found[name] = str(folder / name)
    return found


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], tuple[Any, str]]:
    """Return a function that starts all but the server: it returns the configuration and the error line."""

    def run(arguments: list[str]) -> tuple[ServeConfig | None, str]:
        checked: list[ServeConfig] = []

        def serve(config: ServeConfig) -> int:
            check_start(config)
            checked.append(config)
            return 0

        monkeypatch.setattr(server, "serve", serve)
        done = CliRunner().invoke(app, ["serve", *arguments])
        assert done.exit_code == (0 if checked else 2), done.output
        return next(iter(checked), None), done.stderr

    return run


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_a_line_of_vllm(
    block: str,
    start: Callable[[list[str]], tuple[Any, str]],
    places: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "")  # --download-dir sets it
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "")
    monkeypatch.setattr("deploy.preflight._check_mtp", lambda *_: None)  # the models have no weights
    monkeypatch.setattr("deploy.preflight.host_cores", lambda: 64)  # the lines are of servers with 8 GPUs
    _, line, outcome = block.strip().splitlines()
    for name, path in places.items():
        line, outcome = (re.sub(rf"\b{re.escape(name)}\b", path, text) for text in (line, outcome))
    words = shlex.split(line)
    arguments = words[2:] if words[1] == "serve" else words[3 if words[1] == "-m" else 2 :]
    config, error = start(arguments)
    kind, _, rest = outcome.partition(" ")
    if kind == "refused":
        assert config is None and error.startswith(f"tandem: {rest}"), error
        assert error.count("\n") == 1
        return
    assert config is not None, error
    wanted, _, needless = rest.partition("not needed: ")
    for option, value in re.findall(r"([\w.-]+)=(\(.*?\)|\S+)", wanted):
        field, _, key = option.partition(".")
        found = getattr(config, field)
        if key:
            found = found[key] if isinstance(found, dict) else attrgetter(key)(found)
        assert str(found) == value, option
    told = [re.sub(r"(: not needed: | \S+: here it is ).*", "", text) for text in caplog.messages]
    assert " ".join(told) == needless.strip()


def test_there_are_forty_lines_and_more() -> None:
    assert len(BLOCKS) >= 40


def test_no_flag_stands_in_the_table_twice_or_is_tandems_own() -> None:
    flags = [
        flag.rstrip("=+") for table in (NEEDLESS, REFUSED) for text in table.values() for flag in text.split()
    ]
    flags += RENAMED
    own = {field.replace("_", "-") for field in field_types()}
    assert len(flags) == len(set(flags)) and not own & set(flags)
    assert {name for names in RENAMED.values() for name in names if "." not in name} <= own
    assert {name.partition(".")[0] for name in VALUES} <= own


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["m", "--enable-lora=False"], ["--no-enable-lora", "m"]),
        (["--no-enable-log-requests", "m"], ["--no-enable-log-requests", "m"]),
        (["--enable-prefix-caching", "true", "m"], ["--enable-prefix-caching", "m"]),
        (["--api-key", "a", "b"], ["--api-key=a,b"]),
        (["--max-model-len", "-1"], []),
        (["--enable-sleep-mode", "False", "--no-enable-prompt-embeds"], []),
        (["-O3", "-O.mode=3", "-O", "2", "m"], ["m"]),
        (
            ["--lora-modules", "a=/a", "--lora-modules", "b=/b"],
            ["--lora-modules=a=/a", "--lora-modules=b=/b"],
        ),
        (["--config", "x.yaml", "--", "--port"], ["--config", "x.yaml", "--", "--port"]),
        (
            ["--spec-method", "ngram_gpu", "--spec-tokens=3"],
            ['--speculative-config={"method": "ngram", "num_speculative_tokens": 3}'],
        ),
        (["--speculative-config", "{x"], ["--speculative-config={x"]),
        (
            ["--default_chat_template_kwargs.enable_thinking", "false"],
            ['--default-chat-template-kwargs={"enable_thinking": false}'],
        ),
    ],
)
def test_arguments_are_rewritten(arguments: list[str], meant: list[str]) -> None:
    assert rewrite(arguments, ["config"]) == meant


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--max-num-seq", "4"], "--max-num-seq: there is no such option; is --max-num-seqs "),
        (["--tensor-paralel-size", "4"], "--tensor-paralel-size: .*--tensor-parallel-size"),
        (["--qqq"], "--qqq: there is no such option$"),
        (["--port"], "--port: needs a value$"),
        (["-tp", "--host", "x"], "--tensor-parallel-size: needs a value$"),
        (["-pp", "2"], "--pipeline-parallel-size: a model's layers are not spread over devices"),
    ],
)
def test_arguments_are_refused(arguments: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        rewrite(arguments, ["config"])
