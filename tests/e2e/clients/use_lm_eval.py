"""`lm-eval`: its own task over completions, by log-probabilities of choices and by generated text."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, FOLDER = sys.argv[1:]
TASK = """\
task: {kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
"""
CHOICES = "doc_to_choice: ['yes', 'no']\n"
LIMITS = "generation_kwargs: {until: ['\\n'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n"

with tempfile.TemporaryDirectory() as place:
    folder = Path(place)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}?", "answer": n % 2}) + "\n" for n in range(4)))
    for kind, more in (("multiple_choice", CHOICES), ("generate_until", LIMITS)):
        target = "answer" if kind == "multiple_choice" else '"{{answer}}"'
        (folder / f"{kind}.yaml").write_text(TASK.format(kind=kind, data=data, target=target) + more)
    about = f"model=model,base_url={URL}/v1/completions,tokenizer={FOLDER},num_concurrent=4,max_length=512"
    options = ["--model", "local-completions", "--model_args", about, "--include_path", place]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": place}
    found = subprocess.run(
        [Path(sys.executable).with_name("lm_eval"), *options, "--tasks", "multiple_choice,generate_until"],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
assert found.returncode == 0, found.stdout + found.stderr
assert "|multiple_choice|" in found.stdout and "|generate_until" in found.stdout, found.stdout
