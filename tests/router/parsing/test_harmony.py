"""Answers of gpt-oss are parsed as by `openai-harmony`, OpenAI's own implementation of the format."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.router.parsing.test_parsing import ADD, PARIS, of, parsed

harmony = pytest.importorskip("openai_harmony")

VOCABULARY = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
"""The vocabulary o200k_base, which litellm ships and `openai-harmony` would download."""


def said(text: str, channel: str) -> Any:
    return harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)


def called(name: str, arguments: str, content_type: str = "<|constrain|>json") -> Any:
    message = said(arguments, "commentary").with_recipient(f"functions.{name}")
    return message.with_content_type(content_type)


THOUGHT = said('The user asks 2 + 2.\n\nThat is "4" — vier, 四.', "analysis")
CONVERSATIONS = {
    "an answer": [said("2 + 2 = **4**.", "final")],
    "after a thought": [THOUGHT, said("4 🙂", "final")],
    "a call": [called("get_weather", PARIS)],
    "a call after a thought": [THOUGHT, called("get_weather", PARIS)],
    "after a thought and a preamble": [THOUGHT, said("I look.", "commentary"), called("add", ADD)],
    "arguments of no stated kind": [THOUGHT, called("add", ADD, "json")],
    "nothing but a thought": [THOUGHT],
}


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Any:
    package = importlib.util.find_spec("litellm")
    if package is None or package.origin is None:
        pytest.skip("litellm, which has the vocabulary, is not installed")
    folder = tmp_path_factory.mktemp("encodings")
    (folder / "o200k_base.tiktoken").symlink_to(Path(package.origin).parent / VOCABULARY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def written(encoding: Any, messages: list[Any]) -> list[int]:
    """Return the tokens that follow the prompt's `<|start|>assistant`."""
    tokens = [token for message in messages for token in encoding.render(message)]
    start = encoding.encode("<|start|>assistant", allowed_special="all")
    assert tokens[: len(start)] == start
    return tokens[len(start) :]


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_answers_are_parsed_as_by_harmony(encoding: Any, messages: list[Any]) -> None:
    tokens = written(encoding, messages)
    reasoning, content, calls = "", "", []
    for message in encoding.parse_messages_from_completion_tokens(tokens, harmony.Role.ASSISTANT):
        text = "".join(part.text for part in message.content)
        if message.recipient is not None:
            calls.append((message.recipient.removeprefix("functions."), text))
        elif message.channel == "analysis":
            reasoning += text
        else:
            content += text
    answer = encoding.decode(tokens)
    assert parsed(of("openai", "openai_gptoss"), list(answer)) == (reasoning, content, calls), answer
