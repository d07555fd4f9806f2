"""Flags, environment and file make one configuration; a wrong value names its source."""

import math
import os
from typing import get_args

import msgspec
import pytest

from deploy import resources
from deploy.config import load_config
from models.bundled import BUNDLED_MODEL
from protocol.config import ServeConfig, field_docs, field_types, flag_name
from protocol.errors import ConfigError
from protocol.roles import WorkerRange
from protocol.speculation import DEFAULT_SPECULATION


@pytest.fixture
def config_file(tmp_path):
    def write(text: str):
        path = tmp_path / "tandem.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults():
    expected = ServeConfig(model=str(BUNDLED_MODEL), device="cpu", speculative_config=DEFAULT_SPECULATION)
    assert load_config({"device": "cpu"}, environ={}) == expected


def test_flag_then_environment_then_file_then_default(config_file):
    path = config_file("port: 1\nmax-num-seqs: 1\nblock_size: 1\n")
    environ = {"TANDEM_PORT": "2", "TANDEM_MAX_NUM_SEQS": "2"}
    config = load_config({"port": 3, "max_num_seqs": None}, environ, path)
    assert (config.port, config.max_num_seqs, config.block_size) == (3, 2, 1)
    assert config.max_num_batched_tokens == ServeConfig().max_num_batched_tokens


NONE = '{"method": "none"}'


def test_the_method_none_turns_off_the_default_and_what_other_sources_configure(config_file):
    environ = {"TANDEM_SPECULATIVE_CONFIG": '{"method": "suffix"}'}
    path = config_file("speculative-config:\n  method: none\n")
    for given in (
        {"flags": {"speculative_config": NONE}, "environ": environ},
        {"flags": {"speculative_config": NONE}, "environ": {}},
        {"environ": {"TANDEM_SPECULATIVE_CONFIG": NONE}},
        {"environ": {}, "config_file": path},
    ):
        assert load_config(**given).speculative_config is None


@pytest.mark.parametrize("options", [{"enable_embeddings": True}, {"device": "cuda"}], ids=str)
def test_options_that_exclude_the_default_speculation(options):
    assert load_config({"device": "cpu"} | options, {}).speculative_config is None


def test_draft_workers_still_need_a_method():
    with pytest.raises(ConfigError, match=r"--draft-replicas: needs --speculative-config .* got none"):
        load_config({"device": "cpu", "draft_replicas": 1}, {})


@pytest.mark.parametrize(
    ("ray_address", "fault", "has_build", "speculates"),
    [
        (None, "no driver", True, True),
        (None, "", True, False),
        ("auto", "no driver", True, False),
        ("auto", "no CUDA", False, True),
    ],
)
def test_servers_that_may_have_gpus_speculate_only_if_asked(
    ray_address, fault, has_build, speculates, monkeypatch
):
    monkeypatch.setattr(resources, "cuda_fault", lambda: fault)
    monkeypatch.setattr(resources, "has_cuda_build", lambda: has_build)
    found = load_config({"ray_address": ray_address}, {}).speculative_config
    assert found == (DEFAULT_SPECULATION if speculates else None)


def test_a_gguf_file_of_a_folder_is_the_model():
    config = load_config({"model": "/models/small/", "gguf_file": "q4.gguf"}, environ={})
    assert (config.model, config.model_name) == ("/models/small/q4.gguf", "/models/small/q4")


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("TANDEM_BLOCK_SIZE", "32")
    assert load_config().block_size == 32


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("TANDEM_DISAGGREGATION", "false", "disaggregation", False),
        ("TANDEM_DISAGGREGATION", "0", "disaggregation", False),
        ("TANDEM_TRUST_REMOTE_CODE", "1", "trust_remote_code", True),
        ("TANDEM_GPU_MEMORY_UTILIZATION", "0.5", "gpu_memory_utilization", 0.5),
        ("TANDEM_KV_CACHE_MEMORY_BYTES", "1000000", "kv_cache_memory_bytes", 1_000_000),
        ("TANDEM_API_KEY", "12345", "api_key", "12345"),
        ("TANDEM_API_KEY", "", "api_key", None),
        ("TANDEM_KV_TRANSPORTS", "tcp", "kv_transports", "tcp"),
    ],
)
def test_environment_values_are_parsed_by_field_type(variable, text, field, value):
    assert getattr(load_config(environ={variable: text}), field) == value


def test_every_field_has_a_flag_a_variable_and_a_line_of_help():
    docs = field_docs()
    assert len(docs) > 80
    for field, (text, default) in docs.items():
        assert text.endswith("."), field
        assert default == getattr(ServeConfig(), field)
    assert flag_name("max_model_len") == "--max-model-len"


BAD = [
    ("port", 65536),
    ("port", "http"),
    ("block_size", 0),
    ("gpu_memory_utilization", 0.0),
    ("gpu_memory_utilization", "nan"),
    ("kv_offloading_size", "inf"),
    ("decode_replicas", 1.5),
    ("dtype", "int8"),
    ("handoff_timeout", "soon"),
    ("disaggregation", "perhaps"),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_names_its_source(field, value, config_file):
    def message(**sources) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(**{"environ": {}, **sources})
        return str(caught.value)

    assert message(flags={field: value}).startswith(flag_name(field) + ": ")
    assert message(environ={f"TANDEM_{field.upper()}": str(value)}).startswith(f"TANDEM_{field.upper()}: ")
    path = config_file(f"{flag_name(field)[2:]}: {value}\n")
    assert message(config_file=path).startswith(f"{path}: {flag_name(field)[2:]}: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_num_batched_tokens": 8}, r"--max-num-batched-tokens: .*--max-num-seqs \(128\), got 8"),
        ({"device": "x"}, "--device: must be one of 'auto', 'cpu', 'cuda', got 'x'$"),
        ({"quantization": "x"}, "--quantization: .* 'awq', 'compressed-tensors', 'fp8', 'gptq', 'int4', "),
        (
            {"kv_offloading_size": 1, "enable_prefix_caching": False},
            "--kv-offloading-size: .*--enable-prefix-caching",
        ),
        ({"kv_disk_path": "x", "kv_disk_size": 1}, "--kv-disk-path: .*--kv-offloading-size"),
        ({"kv_disk_path": "x", "kv_offloading_size": 1}, "--kv-disk-size: "),
        (
            {"enable_embeddings": True, "speculative_config": '{"method": "ngram"}'},
            "--enable-embeddings: .*--speculative-config",
        ),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype: .*'int4'"),
        ({"kv_cache_dtype": "fp8", "kv_wire_dtype": "int8"}, "--kv-wire-dtype: int8 .*--kv-cache-dtype fp8"),
        ({"kv_disk_size": 1, "kv_offloading_size": 1}, "--kv-disk-size: .*--kv-disk-path"),
        (
            {"otlp_traces_endpoint": "localhost:4317"},
            "--otlp-traces-endpoint: must be a string that matches ",
        ),
        *(({"kv_transports": each}, "--kv-transports: ") for each in ("", " , ", "rdma", "shm,pigeon")),
        *(
            ({"kv_events_config": config}, f"--kv-events-config: {message}")
            for config, message in {
                "{": "must be JSON",
                "[]": "must be an object",
                '{"encodign": "map"}': "encodign: .*is encoding meant",
                '{"encoding": "xml"}': "encoding: must be one of",
                '{"endpoint": "ipc://x"}': "endpoint: must be like tcp",
                '{"endpoint": "tcp://*:70000"}': "endpoint: the port",
                '{"replay_endpoint": "tcp://*:5558"}': "replay_endpoint: 2 workers take as many ports from",
            }.items()
        ),
        ({"kv_events_config": "{}", "enable_prefix_caching": False}, "--kv-events-config: needs"),
        *(
            ({"lora_modules": modules}, f"--lora-modules: {message}")
            for modules, message in (
                ("a", "must be names with folders, as in sql=/adapters/sql, got 'a'"),
                ([], "must be from 1 to 4096 adapters, got 0"),
                (["a=/x", "a=/y"], "a: is given twice"),
                ({"": "/x"}, "a name must have 1 to 256 characters"),
                (["tandem-code-10m=/x"], "tandem-code-10m: is the model's own name"),
            )
        ),
        *(({"autoscale": each}, "--autoscale: must be roles with ranges") for each in ("", "1:4", {}, 4)),
        ({"autoscale": "cook=1:4"}, "--autoscale: there is no role 'cook'"),
        ({"autoscale": "decode=1:4,decode=1:8"}, "--autoscale: decode: is given twice"),
    ],
    ids=str,
)
def test_wrong_options_are_named(flags, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_config(flags, {})


def test_every_number_has_an_upper_limit():
    kinds = field_types().items()
    numbers = [field for field, kind in kinds if {int, float} & {kind, *get_args(kind)}]
    assert len(numbers) > 30
    for field in numbers:
        with pytest.raises(ConfigError, match=rf"{flag_name(field)}: must be .*\d, got '9{{30}}'"):
            load_config({field: "9" * 30}, environ={})


def test_text_that_no_message_can_hold_is_refused(config_file):
    path = config_file('model: "a\\0b"\n')
    with pytest.raises(ConfigError, match="model: must be UTF-8 without the character NUL"):
        load_config(environ={}, config_file=path)
    with pytest.raises(ConfigError, match="--served-model-name: must be UTF-8 without"):
        load_config({"served_model_name": os.fsdecode(b"\xff")}, environ={})


def test_a_later_source_overrides_a_bad_value(config_file):
    assert load_config({"port": 5}, {"TANDEM_PORT": "x"}, config_file("port: y")).port == 5


@pytest.mark.parametrize("name", ["nope", "max-model-length"])
def test_an_unknown_option_in_the_file(config_file, name):
    path = config_file(f"{name}: 1\n")
    with pytest.raises(ConfigError, match=f"{name}: there is no such option"):
        load_config(environ={}, config_file=path)


@pytest.mark.parametrize(
    "text", ["- a list\n", "just text", "", "a: [1\n", "\x00", "a: !!python/object:os.system {}"]
)
def test_a_file_that_is_no_mapping(config_file, text):
    with pytest.raises(ConfigError, match="--config: "):
        load_config(environ={}, config_file=config_file(text))


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--config: cannot read"):
        load_config(environ={}, config_file=tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="--config: cannot read"):
        load_config(environ={}, config_file=tmp_path / "binary.yaml")


def test_transport_names_keep_their_order():
    assert load_config({"kv_transports": " tcp , shm"}, {}).transport_names == ["tcp", "shm"]


def test_a_configuration_survives_msgpack():
    variables = {"enable_thinking": False, "n": 2**63, "x": {"y": [None, 1.5]}}
    options = {"model": "m", "request_timeout": 5, "max_model_len": 77}
    config = load_config(options | {"default_chat_template_kwargs": variables}, {})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ServeConfig) == config
    assert not math.isnan(config.gpu_memory_utilization)


def test_the_models_name_in_the_api(tmp_path, monkeypatch):
    assert load_config({"model": str(tmp_path)}, {}).model_name == tmp_path.name
    monkeypatch.chdir(tmp_path)
    assert load_config({"model": "."}, {}).model_name == tmp_path.name
    assert load_config({"model": "../."}, {}).model_name == tmp_path.parent.name
    assert load_config({"model": "org/model"}, {}).model_name == "org/model"
    assert load_config({"model": "org/model", "served_model_name": "x"}, {}).model_name == "x"


def test_a_path_from_the_home_folder_is_written_in_full(config_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    path = config_file("chat-template: ~/chat.jinja\napi-key: ~/key\n")
    path.chmod(0o600)
    config = load_config({"model": "~/models/one"}, {}, path)
    assert config.model == "/home/alice/models/one" and config.chat_template == "/home/alice/chat.jinja"
    assert config.api_key == "~/key"


def test_the_file_of_options_is_found_from_the_home_folder(config_file, monkeypatch):
    path = config_file("port: 5\n")
    monkeypatch.setenv("HOME", str(path.parent))
    assert load_config(environ={}, config_file=f"~/{path.name}").port == 5


def test_a_mistyped_variable_is_reported(caplog):
    load_config(environ={"TANDEM_MAX_NUM_SEQ": "3", "TANDEM_URL": "http://a:8000", "TANDEM_CACHE_DIR": "/a"})
    assert [record.message for record in caplog.records] == [
        "TANDEM_MAX_NUM_SEQ is no option; is TANDEM_MAX_NUM_SEQS meant?"
    ]


@pytest.mark.parametrize(
    "value", [["a=/x/a", "b=/x/b=c"], "a=/x/a,b=/x/b=c", {"a": "/x/a", "b": "/x/b=c"}], ids=type
)
def test_adapters_are_names_with_folders(value):
    config = load_config({"lora_modules": value}, {})
    assert config.lora_modules == {"a": "/x/a", "b": "/x/b=c"}
    assert config.serves_adapters


@pytest.mark.parametrize("given", ["decode=1:4", " decode = 1:4 , ", {"decode": "1:4"}, ["decode=1:4"]])
def test_a_range_of_workers_is_read(given):
    assert load_config({"autoscale": given}, {}).autoscale == {"decode": WorkerRange(1, 4)}


@pytest.mark.parametrize("given", ['{"enable_thinking": false}', {"enable_thinking": False}], ids=type)
def test_variables_of_the_chat_template_are_read(given):
    config = load_config({"default_chat_template_kwargs": given}, {})
    assert config.default_chat_template_kwargs == {"enable_thinking": False}


WRONG_VARIABLES = {
    "empty": ("", "must be JSON, as in '{\"enable_thinking\": false}'"),
    "list": ("[1]", "must be a JSON object, got"),
    "no UTF-8": (os.fsdecode(b'{"a": "\xff"}'), "must be JSON"),
    "NaN": ('{"a": NaN}', "must be JSON"),
    "deep": ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "must be JSON"),
    "large integer": ({"a": 2**64}, "must have JSON's values, integers up to 64 bits"),
    "no name": ({None: 1}, "must have JSON's values"),
    "too long": ({"a": "x" * 4096}, "must have at most 4096 bytes of JSON, got 4104"),
}


@pytest.mark.parametrize("case", WRONG_VARIABLES)
def test_wrong_variables_of_the_chat_template_are_named(case):
    given, message = WRONG_VARIABLES[case]
    with pytest.raises(ConfigError, match=f"^--default-chat-template-kwargs: {message}"):
        load_config({"default_chat_template_kwargs": given}, {})


def test_variables_of_the_chat_template_in_the_environment_and_in_a_file(config_file):
    environ = {"TANDEM_DEFAULT_CHAT_TEMPLATE_KWARGS": '{"a": {"b": 1.5}}'}
    assert load_config(environ=environ).default_chat_template_kwargs == {"a": {"b": 1.5}}
    path = config_file("default-chat-template-kwargs:\n  date_string: 2026-01-02\n")
    config = load_config(environ={}, config_file=path)
    assert config.default_chat_template_kwargs == {"date_string": "2026-01-02"}


def test_an_adapters_folder_is_relative_to_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_config({"lora_modules": ["a=here"]}, {}).lora_modules == {"a": f"{tmp_path}/here"}


@pytest.mark.parametrize(
    ("text", "mode"), [("port: 1", 0o666), ("port: 1", 0o602), ("api-key: secret", 0o644)]
)
def test_files_that_others_can_change_or_read_keys_from_are_refused(tmp_path, text, mode):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"--config: .*config.yaml.*\(mode {mode:o}\)"):
        load_config({}, {}, path)
    path.chmod(0o600)
    load_config({}, {}, path)
