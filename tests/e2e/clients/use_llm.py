"""The `llm` command: whole and streamed answers, and a schema."""

import json
import os
import sys
import tempfile
from pathlib import Path

from answers import Event
from click.testing import CliRunner
from common import API

MODEL = f"- {{model_id: tandem, model_name: model, api_base: '{API}', supports_schema: true}}\n"

with tempfile.TemporaryDirectory() as folder:
    os.environ["LLM_USER_PATH"] = folder
    Path(folder, "extra-openai-models.yaml").write_text(MODEL)
    sys.argv[1:] = []  # `llm` looks at them
    from llm.cli import cli

    def llm(*options: str) -> str:
        found = CliRunner().invoke(cli, ["prompt", "-m", "tandem", "--key", "none", *options, "When?"])
        assert found.exit_code == 0, found.output
        return found.output

    seeded = ("-o", "seed", "1", "-o", "max_tokens", "8")
    assert llm(*seeded) == llm(*seeded, "--no-stream")
    assert Event.model_validate_json(llm("--schema", json.dumps(Event.model_json_schema())))
