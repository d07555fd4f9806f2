import os
import subprocess
import sys

CODE = """
import sys
from engine.light_imports import delay_kernels, with_kernels
delay_kernels()
from transformers import LlamaForCausalLM
print(*{"scipy", "sympy", "torch.distributed.tensor", "torch._dynamo.eval_frame"} & set(sys.modules))
import torch
for device in "cpu", "meta":
    with torch.device(device):
        torch.nn.Embedding(2, 2)  # calls a function that the compiler is not to see
        1 / 2 ** torch.arange(0, 8, 2)
kernels = sys.modules["torch._meta_registrations"]
print(*{"sympy", "torch._decomp"} & set(sys.modules))
@with_kernels
def choose(device):
    with torch.device(device):
        return torch.where(torch.ones(2) > 0, 1.0, torch.zeros(2))
choose("cpu")
print(type(kernels).__name__)
choose("meta")
print(type(kernels).__name__)
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
    assert (done.stdout, done.returncode) == ("\n\n_LateModule\nmodule\n1 True\n", 0), done.stderr
