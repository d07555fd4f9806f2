"""Tells whether this machine has our CPU kernels."""

from __future__ import annotations

import pytest
import torch

from engine.linear.packed import kernel_fault

CPU = torch.device("cpu")
NO_KERNEL = kernel_fault(CPU, torch.bfloat16)
needs_kernel = pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))
