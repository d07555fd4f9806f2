"""A change reaches the tests that use it, by import, by process or by name; the nearest come first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.changes import Changes
from tests.tiers.reach import Imports
from tests.tiers.situation import KERNEL_TESTS, situation_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def imports() -> Imports:
    return Imports(ROOT)


def test_an_importing_test_is_nearer_than_one_that_starts_a_server(imports: Imports) -> None:
    distances = imports.distances(["router/requests/journal.py"])
    assert distances["tests/router/test_any_interleaving.py"] == 1
    assert distances["tests/e2e/test_failover.py"] > 1
    assert "tests/engine/sampler/test_sampler.py" not in distances


def test_a_changed_test_has_distance_0_and_reaches_its_importers(imports: Imports) -> None:
    assert imports.distances(["tests/protocol/test_codec.py"]) == {"tests/protocol/test_codec.py": 0}


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("engine/sampler/choose.cpp", "tests/engine/sampler/test_sampler_native.py"),
        ("router/api/pages/index.html", "tests/router/test_page.py"),
        ("decode_worker/loop.py", "tests/e2e/test_failover.py"),
        ("deploy/serve.py", "tests/deploy/test_serve.py"),
        ("tests/router/conftest.py", "tests/router/test_chat.py"),
        ("tests/worker/child.py", "tests/worker/test_worker_life.py"),
    ],
)
def test_other_files_and_started_processes_count(imports: Imports, changed: str, test: str) -> None:
    assert imports.distances([changed])[test] > 0


def test_a_common_import_of_all_tests_does_not_count(imports: Imports) -> None:
    assert imports.distances(["tests/conftest.py", "removed.py", "docs/design.md"]) == {}


@pytest.mark.parametrize(
    ("changed", "is_kernel", "everything"),
    [
        ("engine/devices/cuda/attention/attend.py", True, False),
        ("tests/engine/interpreted/cases.py", True, False),
        ("engine/step/scheduler.py", False, False),
        ("docs/gpu.md", False, False),
        ("README.md", False, False),
        ("pyproject.toml", False, True),
        ("tests/forked.py", False, True),
    ],
)
def test_changed_kernels_and_files_that_may_change_any_result_are_known(
    changed: str, is_kernel: bool, everything: bool
) -> None:
    situation = situation_of(ROOT, Changes("a commit", frozenset([changed])))
    assert (situation.whole, situation.everything) == (KERNEL_TESTS if is_kernel else (), everything)
