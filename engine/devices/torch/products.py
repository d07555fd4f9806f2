"""Finds what of a forward torch multiplies: the last bits of such a row may depend on the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "matmul", "linear", "_grouped_mm", "_scaled_mm"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), 1),
}
"""Torch's operators by the place of their left factor, whose last dimension is summed over."""


def torch_products(run: Callable[[], object]) -> list[str]:
    """Return the names of torch's operators that sum products while `run` runs."""
    with _Watch() as watch:
        run()
    return sorted(watch.found)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            left: Tensor = args[_PRODUCTS[name]]
            if left.shape[-1] > 1:  # such as that of a rotary embedding is no sum
                self.found.add(name)
        elif "conv" in name or "einsum" in name:
            self.found.add(name)
        return func(*args, **(kwargs or {}))
