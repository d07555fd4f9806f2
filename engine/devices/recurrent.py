"""Chooses the operators of recurrent layers for a device."""

from __future__ import annotations

import importlib
import logging

import torch

from engine.batch.runner import StepOperators
from engine.devices.cpu.recurrent.native import CpuOperators
from engine.devices.torch.recurrent import TorchOperators
from engine.kv.state_slots import StateLayout, StateSlots
from engine.triton_support import triton_fault
from native.build import BuildError

logger = logging.getLogger("tandem.engine")


def operators_of(state_slots: StateSlots) -> StepOperators:
    """In C++ or Triton where that serves these state slots, else torch's."""
    on_cpu = state_slots.device.type == "cpu"
    fault = _cpu_fault(state_slots.layout) if on_cpu else triton_fault(state_slots.device)
    try:
        if fault is None:
            return CpuOperators(state_slots) if on_cpu else _triton_operators(state_slots)
    except BuildError as error:
        fault = str(error)
    logger.warning("recurrent layers run in torch's operators: %s", fault)
    return TorchOperators(state_slots)


def _cpu_fault(layout: StateLayout) -> str | None:
    if layout.dtype not in (torch.float32, torch.bfloat16):
        return f"the cpu kernel does not take {layout.dtype}"
    reach = max(layer.taps - 1 for layer in layout.layers)
    return f"the cpu kernel does not take convolutions of {reach + 1}" if reach > layout.grid else None


def _triton_operators(state_slots: StateSlots) -> StepOperators:
    kernels = importlib.import_module("engine.devices.cuda.recurrent.operators")  # not there on every host
    operators: StepOperators = kernels.TritonOperators(state_slots)
    return operators
