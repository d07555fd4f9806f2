"""`--speculative-config` and a request's `speculative`: accepted values, and how others are refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.config import load_config, speculative_config
from models.bundled import BUNDLED_FOLDER, BUNDLED_MODEL, DRAFTS
from protocol.config import ServeConfig
from protocol.errors import ConfigError, InvalidRequestError
from protocol.speculation import (
    DEFAULT_SPECULATION,
    METHODS,
    SELF,
    WEIGHTLESS,
    MethodState,
    RequestSpeculation,
    SpeculationState,
    SpeculativeConfig,
    StepTimeState,
    check_request_speculation,
    describe,
    parse_request_speculation,
)
from protocol.worker_to_router import WorkerState

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
DRAFT = BUNDLED_FOLDER / "tandem-code-1m"


def parsed(fields: object, target: str | None = None) -> SpeculativeConfig:
    return speculative_config(fields, "--speculative-config", target or "another")


def refusal(fields: object, target: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(fields, target)
    message = str(caught.value)
    assert message.startswith("--speculative-config: ")
    return message.removeprefix("--speculative-config: ")


def test_flag_environment_and_file_mean_the_same(tmp_path: Path) -> None:
    wanted = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    text = json.dumps(NGRAM)
    (tmp_path / "c.yaml").write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 4\n")
    for config in (
        load_config({"speculative_config": text}, {}),
        load_config({}, {"TANDEM_SPECULATIVE_CONFIG": text}),
        load_config({}, {}, tmp_path / "c.yaml"),
    ):
        assert config.speculative_config == wanted
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ServeConfig) == config
    empty = load_config({"device": "cpu"}, {"TANDEM_SPECULATIVE_CONFIG": ""})
    assert empty.speculative_config == DEFAULT_SPECULATION


def test_a_bad_value_names_its_source(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("speculative_config:\n  method: ngram\n  prompt_lookup_max: 0\n")
    value = '{"method": "ngram", "prompt_lookup_max": 0}'
    sources: dict[str, dict[str, Any]] = {
        "--speculative-config": {"flags": {"speculative_config": value}},
        "TANDEM_SPECULATIVE_CONFIG": {"environ": {"TANDEM_SPECULATIVE_CONFIG": value}},
        f"{path}: speculative_config": {"config_file": path},
    }
    for source, given in sources.items():
        with pytest.raises(ConfigError) as caught:
            load_config(**{"environ": {}, **given})
        assert str(caught.value) == f"{source}: prompt_lookup_max: must be an integer from 1 to 4096, got 0"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"method": "x"}, "method: must be one of 'custom', .*'draft_model'.*got 'x'"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens: must be an integer from 0 to 32 or 'auto'"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: must be an integer from 0 to 32"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens: must be an integer from 0 to 32"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens: must be an integer from 0 to 32"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens: must be an integer from 0 to 32"),
        ({"max_speculative_tokens": 0}, "max_speculative_tokens: must be an integer from 1 to 32, got 0"),
        ({"verification": "loose"}, "verification: must be one of 'block', 'coupled', 'standard'"),
        ({"tree": "yes"}, "tree: must be true or false, got 'yes'"),
        ({"tree": True}, "tree: the method ngram drafts no tree"),
        ({"tree_nodes": 64}, "tree_nodes: must be an integer from 1 to 63, got 64"),
        ({"prefill": "never"}, "prefill: must be one of 'auto', 'carry', 'rebuild'"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min: must be an integer from 1 to 4096"),
        ({"prompt_lookup_min": 6}, "prompt_lookup_min: 6 exceeds prompt_lookup_max=5"),
        ({"suffix_decoding_max_tree_depth": 257}, "suffix_decoding_max_tree_depth: .* from 2 to 256"),
        ({"suffix_decoding_max_spec_factor": float("inf")}, "suffix_decoding_max_spec_factor: .*finite"),
        ({"suffix_decoding_max_spec_factor": float("nan")}, "suffix_decoding_max_spec_factor: .*finite"),
        ({"suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob: .* from 0 to 1, got 1.5"),
        ({"lookahead_ngram": 1}, "lookahead_ngram: must be an integer from 2 to 8, got 1"),
        ({"lookahead_ngram": 8, "lookahead_window": 16}, "lookahead_window: .* is 147, at most 63 rows"),
        ({"model": 3}, "model: must be a string, got 3"),
        ({"model": "x"}, "model: the method ngram has none"),
        ({"drafter": "a:B"}, "drafter: the method ngram has none"),
        ({"method": "custom"}, "drafter: the method custom needs one, as module:name"),
        ({"method": "custom", "drafter": "a.B"}, "drafter: must be module:name, got 'a.B'"),
        ({"method": "custom", "drafter": 3}, "drafter: must be a string, got 3"),
        ({"method": "custom", "drafter": "a:B", "tree": True}, "tree: the method custom drafts no tree"),
        ({"num_spec_tokens": 3}, "num_spec_tokens: there is no such field; is num_speculative_tokens meant?"),
        ({"precision": "x"}, "precision: there is no such field; there are method, model, "),
        ({"quantization": "int3"}, "quantization: must be one of 'fp8', 'int4', 'int8', 'mxfp4', got 'int3'"),
        ({"quantization": "int8"}, "quantization: must be absent: the method ngram has no draft model"),
        ({"skip_layers": [1]}, "skip_layers: must be absent: the method ngram drafts without layers"),
        ({"exit_layer": 1}, "exit_layer: must be absent: the method ngram drafts without layers"),
        ({"method": SELF, "exit_layer": 0}, "exit_layer: must be an integer from 1 to 4096, got 0"),
        (
            {"method": SELF, "skip_layers": [2, -1]},
            "skip_layers: must be a list, each an integer of at least 0, got",
        ),
        ({"method": SELF, "skip_layers": [1], "exit_layer": 1}, "exit_layer: .* where skip_layers is given"),
        ({"method": SELF, "tree": True}, "tree: the method self_speculative drafts no tree"),
        ({"method": "dflash", "tree": True}, "tree: the method dflash drafts no tree"),
        ({"method": SELF, "model": "x"}, "model: the method self_speculative has none"),
    ],
)
def test_a_bad_field_is_named_with_its_limit(fields: dict, expected: str) -> None:
    message = refusal({"method": "ngram", **fields})
    field, _, reason = message.partition(": ")
    wanted_field, _, wanted = expected.partition(": ")
    assert field == wanted_field
    assert re.search(wanted, reason), message


@pytest.mark.parametrize(
    "value", ["", "ngram", "{", "[]", "3", '"ngram"', "null", [], 3, '{"method": ["ngram"]}', "{}"]
)
def test_anything_but_an_object_with_a_method_is_refused(value: object) -> None:
    assert "method" in refusal(value)


def test_null_means_not_given_and_eagle3_means_eagle() -> None:
    config = parsed({"method": "eagle3", "model": str(DRAFT), "num_speculative_tokens": None})
    assert (config.method, config.num_speculative_tokens, config.fixed_tokens) == ("eagle", "auto", None)


def test_a_model_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()

    def model(name: str) -> str | None:
        return parsed({"method": "draft_model", "model": name}).model

    assert model("mine") == model("./mine") == str(tmp_path / "mine")
    assert model("tandem-code-1m") == str(DRAFT)
    assert model("someone/tandem-code-1m") == "someone/tandem-code-1m", "a name on the hub"
    assert model(os.path.relpath(DRAFT)).startswith("/")
    (tmp_path / "tandem-code-1m").mkdir()
    assert model("tandem-code-1m") == str(tmp_path / "tandem-code-1m"), "what lies here comes first"
    for missing in ("./none", "/no/such/folder", "~/no such folder"):
        message = refusal({"method": "draft_model", "model": missing})
        assert message == f"model: there is no folder {missing}"


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle"),
        ({"model_type": "eagle", "architectures": ["EAGLEModel"]}, "eagle"),
        ({"medusa_num_heads": 5, "base_model_name_or_path": "x"}, "medusa"),
        ({"model_type": "medusa", "architectures": ["MedusaModel"]}, "medusa"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "draft_model"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {}}, "dflash"),
        ({"speculators_model_type": "dflash", "draft_vocab_size": 32000}, "dflash"),
    ],
)
def test_a_drafts_config_tells_the_method(config: dict, method: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for fields in ({"model": str(tmp_path)}, {"model": str(tmp_path), "method": None, "prefill": "carry"}):
        assert parsed(fields).method == method
    assert parsed({"model": "tandem-code-10m-medusa"}).method == "medusa"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (
            '{"speculators_model_type": "dspark"}',
            "model: .*speculators_model_type 'dspark' is .*which vLLM serves",
        ),
        ('{"speculators_model_type": "new"}', "model: .*speculators_model_type 'new' is none of eagle3"),
        ('{"architectures": ["BertModel"]}', "method: must be given, since .*config.json tells none"),
        ("[]", "model: .*config.json: must be a JSON object"),
        ("{", "model: .*config.json: cannot be read: "),
    ],
)
def test_a_draft_that_tells_no_served_method_is_refused(content: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    assert re.match(complaint, refusal({"model": str(tmp_path)}))


def test_the_bundled_model_has_a_bundled_draft() -> None:
    assert set(DRAFTS[BUNDLED_MODEL.name]) == set(METHODS) - {*WEIGHTLESS, SELF, "mtp", "dflash"}
    config = load_config({"speculative_config": '{"method": "draft_model"}'}, {})
    assert config.speculative_config is not None
    assert config.speculative_config.model == str(DRAFT)
    relative = os.path.relpath(BUNDLED_MODEL)
    assert parsed({"method": "draft_model"}, relative).model == str(DRAFT)


def test_mtp_heads_are_the_models_own(tmp_path: Path) -> None:
    assert parsed({"method": "mtp"}, str(tmp_path)).model == str(tmp_path)
    assert parsed({"method": "mtp"}, "org/model").model == "org/model"
    assert parsed({"method": "mtp", "model": "org/heads"}, "org/model").model == "org/heads"
    assert parsed({"method": "qwen3_next_mtp"}, "org/model").method == "mtp", "vLLM's names"


def test_any_other_model_needs_its_own_draft(tmp_path: Path) -> None:
    for target in (None, str(tmp_path), "org/model"):
        assert refusal({"method": "draft_model"}, target) == "model: the method draft_model needs one"
    with pytest.raises(ConfigError, match="model: the method draft_model needs one"):
        load_config({"speculative_config": {"method": "draft_model"}, "model": "org/model"}, {})


def test_values_that_differ_from_the_defaults_are_shown() -> None:
    assert describe(parsed({"method": "ngram"})) == "ngram"
    assert describe(parsed(NGRAM)) == "ngram (num_speculative_tokens 4)"
    assert describe(None) == "none (a request may ask for ngram, suffix, lookahead)"


# --- requests -------------------------------------------------------------------------------------


def request_refusal(fields: dict) -> tuple[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request_speculation(fields)
    return caught.value.field, caught.value.message


def test_a_request_chooses_its_drafts() -> None:
    assert parse_request_speculation(None) is None
    assert parse_request_speculation({}) is None
    assert parse_request_speculation({"enabled": None, "method": None}) == RequestSpeculation()
    asked = parse_request_speculation({"method": "eagle3", "num_speculative_tokens": 0, "enabled": False})
    assert asked == RequestSpeculation(enabled=False, method="eagle", num_speculative_tokens=0)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"num_speculative_tokens": 33}, "num_speculative_tokens", "must be an integer from 0 to 32, got 33"),
        (
            {"num_speculative_tokens": "auto"},
            "num_speculative_tokens",
            "must be an integer from 0 to 32, got 'auto'",
        ),
        ({"enabled": 1}, "enabled", "must be true or false, got 1"),
        ({"place": "moon"}, "place", "must be one of 'local', 'none', 'remote', got 'moon'"),
        ({"metod": "ngram"}, "metod", "there is no such field; is method meant?"),
    ],
)
def test_a_requests_bad_field_is_named_with_its_limit(fields: dict, field: str, message: str) -> None:
    assert request_refusal(fields) == (f"speculative.{field}", message)


@pytest.mark.parametrize(
    "deployed", [None, SpeculativeConfig(method="ngram"), SpeculativeConfig(method="medusa", model="m")]
)
def test_a_method_without_its_weights_is_refused_by_name(deployed: SpeculativeConfig | None) -> None:
    with pytest.raises(InvalidRequestError, match="'eagle' needs weights that this server has not loaded"):
        check_request_speculation(RequestSpeculation(method="eagle"), deployed)
    for method in (*WEIGHTLESS, deployed.method if deployed else "ngram"):
        check_request_speculation(RequestSpeculation(method=method), deployed)
    check_request_speculation(RequestSpeculation(method="eagle", enabled=False), deployed)
    check_request_speculation(None, deployed)


@pytest.mark.parametrize(
    "fields", [{"enabled": True}, {"num_speculative_tokens": 4}, {"place": "local"}, {"method": None}]
)
def test_drafts_without_a_method_are_refused(fields: dict) -> None:
    asked = parse_request_speculation(fields)
    with pytest.raises(
        InvalidRequestError, match=r"--speculative-config.* ngram, suffix, lookahead"
    ) as caught:
        check_request_speculation(asked, None)
    assert caught.value.field == "speculative.method"
    check_request_speculation(asked, SpeculativeConfig(method="ngram"))
    for harmless in ({}, {"enabled": False}, {"num_speculative_tokens": 0}, {"place": "none"}):
        check_request_speculation(parse_request_speculation(harmless), None)


METHOD = MethodState(
    method="eagle",
    num_requests=3,
    num_tokens=9,
    acceptance=[0.9, 0.75, 0.5],
    start_s=1e-4,
    level_s=1e-3,
    token_s=1e-5,
    by_class={"greedy": [0.95, 0.8], "sampled": [0.6]},
    read_s=1e-6,
)
STATE = SpeculationState(
    max_tokens=8,
    methods=[METHOD],
    step_time=StepTimeState(
        sequences=[1, 2], drafted=[0, 1, 2], seconds=[[2e-3, 2e-3, 3e-3], [2e-3, 3e-3, 5e-3]]
    ),
)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("max_tokens",), 64),
        (("max_tokens",), -1),
        (("methods",), [{"method": "eagle"}] * (len(METHODS) + 3)),
        (("methods", 0, "method"), "guess"),
        (("methods", 0, "num_requests"), -1),
        (("methods", 0, "acceptance"), [1.5]),
        (("methods", 0, "acceptance"), [0.5] * 64),
        (("methods", 0, "level_s"), -1e-3),
        (("methods", 0, "by_class"), {"random": [0.5]}),
        (("methods", 0, "by_class", "greedy"), [0.5] * 64),
        (("step_time", "sequences"), [1] * 17),
        (("step_time", "drafted"), [1] * 17),
        (("step_time", "seconds"), [[1.0]] * 17),
        (("step_time", "seconds", 0), [-1.0]),
    ],
)
def test_values_out_of_bounds_are_refused(path: tuple[Any, ...], value: object) -> None:
    fields = msgspec.to_builtins(
        WorkerState(worker_id="d0", incarnation="i", role="decode", speculation=STATE)
    )
    target = fields["speculation"]
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, WorkerState)
