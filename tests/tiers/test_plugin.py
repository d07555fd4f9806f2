"""A run of pytest with tiers: its choice of tests, its closing line, its recording."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers.choice import TENTHS, Situation
from tests.tiers.costs import Cost, Costs, Module, dump, load
from tests.tiers.plugin import Chooser

ROOT = Path(__file__).parents[2]
MODULE, OTHER = "tests/test_some.py", "tests/test_other.py"
CONFTEST = """
import pytest
from tests.tiers import plugin

pytest_addoption, pytest_configure = plugin.add_options, plugin.register

@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput.update(plugin.worker_input(node.config))
"""
TESTS = """
import time
import pytest

@pytest.fixture(scope="module")
def shared():
    end = time.process_time() + 1.6
    while time.process_time() < end: pass

def test_cheap(): pass
def test_a(shared): pass
def test_b(shared): pass
def test_skipped(): pytest.skip("no such thing")
"""


def run(root: Path, *arguments: str) -> tuple[int, list[str]]:
    """Return the exit status and the last lines."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TEST_SEED": ""}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / MODULE).write_text(TESTS)
    return tmp_path


def test_named_tests_run_at_any_cost_and_fail_on_a_skip_without_a_reason(root: Path) -> None:
    (root / MODULE).write_text(f"{TESTS}\n@pytest.mark.skip\ndef test_unexplained(): pass\n")
    record = Costs(
        {MODULE: Module(Cost(1.0, 1.0), {"test_a": Cost(100.0, 1.0), "test_cheap": Cost(1.0, 1.0)})}
    )
    dump(record, root)
    status, lines = run(root, "--tier", "fast", "--record-costs", MODULE)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert lines[-2] == "FAILED: 1 skips give no reason (-rs shows them)"
    assert lines[-1].startswith(
        "3 passed, 2 skipped (1 no such thing; 1 unconditional skip), fast tier, seed 0 in "
    )
    recorded = load(root).modules[MODULE].expensive
    assert recorded.keys() == {"test_a", "test_b"}
    assert all(0.8 <= cost.cpu_s < 1.2 for cost in recorded.values())


def test_the_fast_tier_leaves_expensive_tests_out(root: Path) -> None:
    names = [f"test_{number}" for number in range(30)]
    (root / MODULE).write_text(TESTS + "".join(f"def {name}(): pass\n" for name in names))
    (root / OTHER).write_text("def test_dear(): pass\n")
    record = {MODULE: Module(Cost(0.1, 0.1), dict.fromkeys(names, Cost(0.1, 1.0)))}
    dump(Costs(record | {OTHER: Module(Cost(0.0, 0.0), {"test_dear": Cost(5.0, 1.0)})}), root)
    status, lines = run(root, "-p", "xdist.plugin", "-n", "1", "--tier", "fast")
    assert status == pytest.ExitCode.OK
    left_out = "3 CPU-s left out in 1 modules"  # this commit's tenth is the other module
    assert lines[-1].startswith(f"4 passed, 1 skipped (1 no such thing), {left_out}, fast tier, seed 0 in ")


def test_modules_without_chosen_tests_are_not_imported(root: Path) -> None:
    far = [root / f"tests/test_far_{number}.py" for number in range(TENTHS)]
    for file in [root / OTHER, *far]:
        file.touch()
    known = [str(file.relative_to(root)) for file in [root / MODULE, *far]]
    dump(Costs({path: Module(Cost(1.0, 1.0), {"test_x": Cost(1.0, 1.0)}) for path in known}), root)
    config: Any = SimpleNamespace(rootpath=root)
    chooser = Chooser(config, Situation(distances={MODULE: 1}, canaries=[f"{known[1]}::test_x"]))
    ignored = {file for file in [root / OTHER, root / MODULE, *far] if chooser.pytest_ignore_collect(file)}
    assert ignored <= {*far[1:]}
    assert len(ignored) >= len(far) - 3, "one or two are in this commit's tenth"
    assert not chooser.pytest_ignore_collect(root / "tests/conftest.py")
