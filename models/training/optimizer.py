"""fp32 master weights for a bf16 model, stepped by Muon (matrices) and AdamW (embeddings, head and norms)."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn


class MasterWeights:
    """Holds a model's weights in fp32, gathers its gradients, steps, and writes the bf16 weights back.

    Muon (Jordan et al., 2024) orthogonalizes the momentum of each weight matrix; its update is scaled to
    AdamW's RMS (Liu et al., 2025), so that one learning rate fits both.
    """

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
        matrices = [p for name, p in self.masters.items() if p.ndim == 2 and ".layers." in name]
        others = [p for name, p in self.masters.items() if p.ndim != 2 or ".layers." not in name]
        self.optimizers = {
            "adamw": torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
            "muon": torch.optim.Muon(
                matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
        }

    def take_gradients(self, model: nn.Module) -> None:
        """Add the model's gradients to the masters', and clear the model's."""
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            master = self.masters[name]
            master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def step(self, model: nn.Module, scale: float) -> None:
        """Clip to norm 1, step at `scale` times the learning rate, and copy the weights to the model."""
        torch.nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._write_back(model)

    @torch.no_grad()
    def _write_back(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(self.masters[name])

    def save(self, path: Path, step: int) -> None:
        """Write weights and optimizer state after `step` steps, replacing `path` at once."""
        tensors = {f"master/{name}": p.detach() for name, p in self.masters.items()}
        for kind, optimizer in self.optimizers.items():
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{kind}/{index}/{key}": value for key, value in state.items()}
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"step": str(step)})
        partial.replace(path)

    def load(self, path: Path, model: nn.Module) -> int:
        """Restore what `save` wrote into the masters and `model`; return the step it was saved at."""
        tensors = load_file(path)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[f"master/{name}"])
        for kind, optimizer in self.optimizers.items():
            content = optimizer.state_dict()
            for key, value in tensors.items():
                if key.startswith(f"{kind}/"):
                    _, index, field = key.split("/")
                    content["state"].setdefault(int(index), {})[field] = value
            optimizer.load_state_dict(content)
        self._write_back(model)
        with safe_open(path, "pt") as file:
            return int(file.metadata()["step"])
