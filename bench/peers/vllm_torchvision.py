"""A patch that lets vLLM's environment import torchvision, which vLLM imports for some text models without
calling its operators.

The library in torchvision's wheel is built for CUDA builds of torch. Without the library the operators are
not declared, and the import fails when torchvision registers more about them.
"""

from __future__ import annotations

from pathlib import Path

_MODULE = "torchvision_operators"
_SOURCE = """\
import torch

_library = torch.library.Library("torchvision", "DEF")
for _name in (
    "nms", "qnms", "roi_align", "qroi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d",
    "_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward",
    "_deform_conv2d_backward",
):
    _library.define(f"{_name}(Tensor x) -> Tensor")
"""


def declare_operators(site_packages: Path) -> None:
    """Declare the operators at the start of every Python in the environment: vLLM inspects models in
    separate processes.
    """
    (site_packages / f"{_MODULE}.py").write_text(_SOURCE)
    (site_packages / f"{_MODULE}.pth").write_text(f"import {_MODULE}\n")
