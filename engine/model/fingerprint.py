"""Tells one model's weights from another's: a model may be trained again under the same name, and KV of the
old weights is of no use then, in whatever worker or file it lies."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

SAMPLES = 256
"""Elements of each tensor that are looked at; training changes nearly all of them."""

_OF_NO_CONSEQUENCE = ("_name_or_path", "transformers_version")


def model_fingerprint(model: PreTrainedModel) -> bytes:
    """16 bytes that depend on the model's configuration, device type and a sample of each weight tensor, and
    on how layers round their inputs.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _OF_NO_CONSEQUENCE}
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([config, model.device.type], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)].to("cpu", torch.float32)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.numpy().tobytes())
    groups = {name: getattr(module, "input_group", 0) for name, module in model.named_modules()}
    rounding = [f"{name} {group}" for name, group in groups.items() if group]
    digest.update("\n".join(rounding).encode())
    return digest.digest()
