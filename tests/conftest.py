"""Which tests may run beside which, when pytest-xdist shares them among processes."""

from __future__ import annotations

from pathlib import Path

import pytest

MACHINE_WIDE = ("tests/deploy", "tests/faults", "tests/kvtransfer", "tests/e2e/test_object_store_serving.py")
"""They look at what is left on the machine, in /dev/shm and elsewhere: one after the other."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        path = Path(item.path).relative_to(config.rootpath).as_posix()
        group = "machine" if path.startswith(MACHINE_WIDE) else path
        item.add_marker(pytest.mark.xdist_group(group))
