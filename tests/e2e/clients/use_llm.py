"""The `llm` command: whole and streamed answers, and a schema."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from answers import Event
from common import API

MODEL = f"- {{model_id: tandem, model_name: model, api_base: '{API}', supports_schema: true}}\n"

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(MODEL)

    def llm(*options: str) -> str:
        command = [Path(sys.executable).with_name("llm"), "-m", "tandem", "--key", "none", *options, "When?"]
        found = subprocess.run(command, env={**os.environ, "LLM_USER_PATH": folder}, capture_output=True)
        assert found.returncode == 0, found.stderr.decode()
        return found.stdout.decode()

    seeded = ("-o", "seed", "1", "-o", "max_tokens", "8")
    assert llm(*seeded) == llm(*seeded, "--no-stream")
    assert Event.model_validate_json(llm("--schema", json.dumps(Event.model_json_schema())))
