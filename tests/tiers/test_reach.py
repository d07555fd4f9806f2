"""A change reaches the tests that use it, by import, by process or by name; the nearest come first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.changes import Changes
from tests.tiers.reach import Imports
from tests.tiers.situation import KERNEL_TESTS, kernel_changed, situation_of

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
    ("changed", "is_kernel"),
    [
        ("engine/devices/cuda/attention/attend.py", True),
        ("tests/engine/interpreted/cases.py", True),
        ("engine/step/scheduler.py", False),
        ("docs/gpu.md", False),
    ],
)
def test_kernels_and_their_interpreted_tests_are_known(changed: str, is_kernel: bool) -> None:
    assert kernel_changed(ROOT, [changed]) == is_kernel


def test_a_changed_kernel_runs_all_tests_that_interpret_it() -> None:
    changes = Changes("a commit", frozenset(["engine/devices/cuda/attention/attend.py"]))
    assert situation_of(ROOT, changes).whole == KERNEL_TESTS
    assert not situation_of(ROOT, Changes("a commit", frozenset(["engine/step/scheduler.py"]))).whole


@pytest.mark.parametrize(
    ("changed", "everything"),
    [
        ("pyproject.toml", True),
        ("tests/forked.py", True),
        ("README.md", False),
        ("engine/step/scheduler.py", False),
    ],
)
def test_some_files_may_change_any_result(changed: str, everything: bool) -> None:
    assert situation_of(ROOT, Changes("a commit", frozenset([changed]))).everything == everything
