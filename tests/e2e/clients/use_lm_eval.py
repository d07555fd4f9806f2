"""`lm-eval`: its own task over completions, by log-probabilities of choices and by generated text."""

import json
import os
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
    os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": place, "USE_TORCH": "0"}
    import lm_eval
    from lm_eval.tasks import TaskManager

    folder = Path(place)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}?", "answer": n % 2}) + "\n" for n in range(4)))
    for kind, more in (("multiple_choice", CHOICES), ("generate_until", LIMITS)):
        target = "answer" if kind == "multiple_choice" else '"{{answer}}"'
        (folder / f"{kind}.yaml").write_text(TASK.format(kind=kind, data=data, target=target) + more)
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=f"model=model,base_url={URL}/v1/completions,tokenizer={FOLDER},num_concurrent=4,max_length=512",
        tasks=["multiple_choice", "generate_until"],
        task_manager=TaskManager(include_path=place, include_defaults=False),
        bootstrap_iters=0,
    )
assert found["results"]["multiple_choice"]["acc,none"] in (0, 0.25, 0.5, 0.75, 1)
assert found["n-samples"]["generate_until"]["effective"] == 4
