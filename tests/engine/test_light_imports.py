import os
import subprocess
import sys

CODE = """
import engine, sys
from transformers import LlamaForCausalLM
print(*{"scipy", "sympy", "torch.distributed.tensor", "torch._dynamo.eval_frame"} & set(sys.modules))
import torch
with torch.device("cpu"):
    torch.nn.Embedding(2, 2)  # calls a function that the compiler is not to see
seen = []
def backend(graph, inputs):
    seen.append(graph)
    return graph.forward
torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
print(len(seen), torch._dynamo.config is sys.modules["torch._dynamo.config"])
"""


def test_model_classes_bring_no_compiler_until_it_is_used():
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("\n1 True\n", 0), done.stderr
