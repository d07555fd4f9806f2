"""A plugin for pytest that makes Triton's interpreter faster. At each call of a function in a kernel it puts
its own operators in the place of Triton's, where they are since the launch: a third of its time.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang


def patch_where_needed(function: Any) -> Any:
    modules = [each for each in function.__globals__.values() if inspect.ismodule(each)]
    if any(tl.core.is_builtin(each.load) for each in modules if each in (tl, tl.core)):
        return _patch(function)
    return None


interpreter._patch_lang = patch_where_needed
