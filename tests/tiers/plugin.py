"""The pytest plugin of the tiers: options, choice of tests, seed, recording, closing line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from tests.processes import Processes
from tests.tiers import costs
from tests.tiers.changes import Changes, find_changes
from tests.tiers.choice import Choice, Situation, choose, missing
from tests.tiers.closing import NO_REASON, LeftOut, closing_line, reasons_of
from tests.tiers.recorder import PROPERTY, Recorder, shared_out
from tests.tiers.seeds import set_seed
from tests.tiers.situation import situation_of

LISTED = 20
"""Print at most this number of modules with reached tests that are left out."""


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers of tests")
    group.addoption(
        "--tier", choices=("fast", "full"), help="what runs where no tests are named: docs/testing.md"
    )
    group.addoption(
        "--seed", type=int, help="seed of the randomized tests (in the full tier a fresh one, else 0)"
    )
    group.addoption("--base", default="", help="commit with which the fast tier compares the working tree")
    group.addoption(
        "--record-costs", action="store_true", help="write what the tests cost to tests/costs.json"
    )
    group.addoption("--processes", type=int, default=0, help="run the tests in so many forks of this process")


def register(config: pytest.Config) -> None:
    """Register the plugins for this process."""
    host = Host(config)
    config.pluginmanager.register(host)
    if config.getoption("record_costs"):
        config.pluginmanager.register(Recorder())
    if host.situation:
        config.pluginmanager.register(Chooser(config, host))
    if config.getoption("processes"):
        config.pluginmanager.register(Processes(config, config.getoption("processes")))


class Chooser:
    """Drops the tests that the fast tier leaves out."""

    def __init__(self, config: pytest.Config, host: Host) -> None:
        self._config = config
        self._host = host

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        tests = [item.nodeid for item in items]
        situation = self._host.situation
        assert situation
        unknown = missing(situation.canaries, tests)
        if unknown:
            raise pytest.UsageError(f"no such canaries: {', '.join(unknown)}; see tests/tiers/canaries.py")
        self._host.choice = choice = choose(tests, costs.load(self._config.rootpath), situation)
        left_out = [item for item in items if item.nodeid not in choice.chosen]
        items[:] = [item for item in items if item.nodeid in choice.chosen]
        self._config.hook.pytest_deselected(items=left_out)


class Host:
    """Sets a run up, and reports at its end what ran, what did not, and why."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = time.monotonic()
        self._tier = config.getoption("tier")
        self._seed = set_seed(config.getoption("seed"), fresh=self._tier == "full")
        config.option.hypothesis_seed = str(self._seed)
        self._changes = Changes("nothing")
        self.situation: Situation | None = None
        self.choice = Choice()
        if self._tier == "fast" and not _names_tests(config):
            self._changes = find_changes(config.rootpath, config.getoption("base"))
            self.situation = situation_of(config.rootpath, self._changes)
        self._rows: list[dict[str, Any]] = []

    def pytest_report_header(self) -> str:
        return f"tier: {self._tier or 'none'}, seed: {self._seed}, compared with {self._changes.since}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._rows += [row for name, row in report.user_properties if name == PROPERTY]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        reached = {test: self.choice.left_out[test].cpu_s for test in sorted(self.choice.reached)}
        modules = Counter(costs.split(test)[0] for test in reached)
        for path, count in modules.most_common(LISTED):
            seconds = sum(cpu_s for test, cpu_s in reached.items() if costs.split(test)[0] == path)
            terminalreporter.write_line(
                f"left out, though reached: {path}: {count} tests, {seconds:.0f} CPU-s"
            )
        if len(modules) > LISTED:
            terminalreporter.write_line(f"left out, though reached: {len(modules) - LISTED} more modules")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        skips = reasons_of(report.longrepr for report in reporter.stats.get("skipped", []))
        without = sum(skips[reason] for reason in NO_REASON)
        if without and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        result = yield
        if self._rows:
            root = self._config.rootpath
            costs.dump(costs.load(root).updated(shared_out(self._rows), root), root)
        if without:
            reporter.write_line(f"FAILED: {without} skips give no reason (-rs shows them)")
        if self._tier:
            reporter.write_line(self._closing(reporter, skips))
        return result

    def _closing(self, reporter: Any, skips: Counter[str]) -> str:
        counts = [text for text, _ in reporter.build_summary_stats_line()[0] if "deselected" not in text]
        left_out = None
        if self.situation:
            choice = self.choice
            cpu_s = sum(cost.cpu_s for cost in choice.left_out.values())
            left_out = LeftOut(len(choice.left_out), cpu_s, len(choice.reached), self._changes.since)
        wall_s = time.monotonic() - self._began
        return closing_line(self._tier, counts, skips, left_out, self._seed, wall_s)


def _names_tests(config: pytest.Config) -> bool:
    """Tell whether the command line names tests: these run whatever they cost."""
    is_default = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return not is_default or bool(config.option.keyword or config.option.markexpr)
