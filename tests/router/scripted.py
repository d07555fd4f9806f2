"""A router whose model says what a test wants."""

from __future__ import annotations

import json

from protocol.config import ServeConfig
from router.parsing.formats import TOOL_FORMATS
from tests.router.conftest import RunningRouter, byte_level_tokenizer
from tests.router.fake_worker import FakeWorker
from tests.router.router_clients import openai_client

ASK = [{"role": "user", "content": "Is it raining in Paris?"}]
HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
    '{# <tool_call>{"name": ... #}'
)
PARIS = '{"city": "Paris 🙂"}'
WEATHER = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


class Scripted:
    """A router whose model says `says` to every request, three tokens per step."""

    def __init__(self, folder, template: str | list | None, **options) -> None:
        folder.mkdir()
        tokenizer = byte_level_tokenizer(500)
        tokenizer.add_special_tokens(
            ["<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>", "｜DSML｜"]
        )
        for name in ("kimi_k2", "gemma4"):
            tokenizer.add_special_tokens([*TOOL_FORMATS[name].markers])
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"eos_token": "<|end|>", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        config = ServeConfig(model=str(folder), port=0, placement="least_loaded", **options)
        self.router = RunningRouter(config)
        self.says = ""
        self.tokenizer = self.router.server.state.tokenizer
        self.worker = self.add_worker("decode-0")
        self.client = openai_client(self.router.url)

    def tokens(self) -> list[int]:
        return [*self.tokenizer.encode(self.says, add_special_tokens=False), 0]

    def add_worker(self, name: str) -> FakeWorker:
        return self.router.add_worker(
            name,
            script=lambda request: self.tokens(),
            finish_reason="stop",
            tokens_per_step=3,
            max_model_len=1024,
        )

    def close(self) -> None:
        self.client.close()
        self.router.close()

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.worker.generated[-1].prompt_token_ids, False)

    def ask(self, says: str, **options):
        self.says = says
        return self.client.chat.completions.create(
            **{"model": self.router.server.config.model_name, "messages": ASK, **options}
        )

    def message(self, says: str, stream: bool, **options):
        """Return the only choice's fields and its finish reason, put together from events if it streams."""
        answer = self.ask(says, stream=stream, **options)
        if not stream:
            return answer.choices[0].message.to_dict(), answer.choices[0].finish_reason
        whole: dict = {"role": None, "content": "", "calls": {}}
        finish_reason = None
        for chunk in answer:
            delta = chunk.choices[0].delta.to_dict()
            assert finish_reason is None
            finish_reason = chunk.choices[0].finish_reason
            for call in delta.pop("tool_calls", ()):
                add_call(whole["calls"], call)
            for name, text in delta.items():
                whole[name] = (whole.get(name) or "") + text
        calls = list(whole.pop("calls").values())
        if calls:
            whole["tool_calls"] = calls
        return whole, finish_reason


def add_call(calls: dict[int, dict], delta: dict) -> None:
    index = delta.pop("index")
    if "id" in delta:
        assert index == len(calls)
        calls[index] = delta
    else:
        calls[index]["function"]["arguments"] += delta["function"]["arguments"]
