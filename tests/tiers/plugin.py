"""The pytest plugin of the tiers: options, choice of tests, seed, recording, closing line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import costs
from tests.tiers.changes import Changes, find_changes, situation_of
from tests.tiers.choice import Situation, choose, missing
from tests.tiers.recorder import PROPERTY, Recorder, shared_out
from tests.tiers.seeds import set_seed

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


def register(config: pytest.Config) -> None:
    """Register the plugins for this process, which runs tests, distributes them by pytest-xdist, or both."""
    from_host: dict[str, Any] | None = getattr(config, "workerinput", None)
    if from_host is None:
        config.pluginmanager.register(Host(config), "tiers-host")
        if config.getoption("numprocesses", None):
            return
    if config.getoption("record_costs"):
        config.pluginmanager.register(Recorder())
    given = _host(config).situation if from_host is None else from_host["situation"]
    if given:
        config.pluginmanager.register(Chooser(config, Situation(**given)))


def worker_input(config: pytest.Config) -> dict[str, Any]:
    """Return the settings for a worker of pytest-xdist."""
    return {"situation": _host(config).situation}


def _host(config: pytest.Config) -> Host:
    host = config.pluginmanager.get_plugin("tiers-host")
    assert isinstance(host, Host)
    return host


class Chooser:
    """Drops the tests that the fast tier leaves out. Modules of which none runs are not even imported."""

    def __init__(self, config: pytest.Config, situation: Situation) -> None:
        self._config = config
        self._canaries = situation.canaries
        self._costs = costs.load(config.rootpath)
        modules = [file.relative_to(config.rootpath) for file in config.rootpath.glob("tests/**/test_*.py")]
        known = self._costs.recorded(map(str, modules))
        choice = choose(known, self._costs, situation)
        self._runs = choice.chosen
        self._modules = {costs.split(test)[0] for test in self._runs}
        left_out = {test: cost.cpu_s for test, cost in choice.left_out.items()}
        self._told = {"left out": left_out, "reached": sorted(choice.reached)}

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        path = collection_path.relative_to(self._config.rootpath)
        is_module = path.name.startswith("test_") and path.suffix == ".py"
        return True if is_module and str(path) not in self._modules else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        unknown = missing(self._canaries, [item.nodeid for item in items])
        if unknown:
            raise pytest.UsageError(f"no such canaries: {', '.join(unknown)}; see tests/tiers/canaries.py")
        left_out = [item for item in items if self._costs.entry(item.nodeid) not in self._runs]
        items[:] = [item for item in items if self._costs.entry(item.nodeid) in self._runs]
        self._config.hook.pytest_deselected(items=left_out)
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput.update(self._told)
        else:
            _host(self._config).learn(self._told)


class Host:
    """Sets a run up, and reports at its end what ran, what did not, and why."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = time.monotonic()
        self._tier = config.getoption("tier")
        self._seed = set_seed(config.getoption("seed"), fresh=self._tier == "full")
        config.option.hypothesis_seed = str(self._seed)
        self._changes = Changes("nothing")
        self.situation: dict[str, Any] = {}
        if self._tier == "fast" and not _names_tests(config):
            self._changes = find_changes(config.rootpath, config.getoption("base"))
            self.situation = vars(situation_of(config.rootpath, self._changes))
        self._left_out: dict[str, float] = {}
        self._reached: list[str] = []
        self._rows: list[dict[str, Any]] = []

    def learn(self, told: dict[str, Any]) -> None:
        """Take the left-out tests from the first process that chose. All processes choose the same."""
        self._left_out, self._reached = told["left out"], told["reached"]

    def pytest_report_header(self) -> str:
        return f"tier: {self._tier or 'none'}, seed: {self._seed}, compared with {self._changes.since}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        told = getattr(node, "workeroutput", None)
        if told and "left out" in told:
            self.learn(told)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._rows += [row for name, row in report.user_properties if name == PROPERTY]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        modules: dict[str, float] = {}
        for test in self._reached:
            path = costs.split(test)[0]
            modules[path] = modules.get(path, 0.0) + self._left_out[test]
        for path, seconds in sorted(modules.items(), key=lambda module: -module[1])[:LISTED]:
            terminalreporter.write_line(f"left out, though reached: {path}: {seconds:.0f} CPU-s")
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
        left_out = ""
        if self.situation:
            modules = {costs.split(test)[0] for test in self._left_out}
            left_out = f"{sum(self._left_out.values()):.0f} CPU-s left out in {len(modules)} modules"
        if reached_s := sum(self._left_out[test] for test in self._reached):
            left_out += f", {reached_s:.0f} of them reached by changes since {self._changes.since}"
        wall_s = time.monotonic() - self._began
        return closing_line(self._tier, counts, skips, left_out, self._seed, wall_s)


def _names_tests(config: pytest.Config) -> bool:
    """Tell whether the command line names tests: these run whatever they cost."""
    is_default = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return not is_default or bool(config.option.keyword or config.option.markexpr)


NO_REASON = {"", "None", "unconditional skip", "<Skipped instance>"}
"""Pytest's texts for a skip without a reason."""


def closing_line(
    tier: str, counts: Sequence[str], skips: Counter[str], left_out: str, seed: int, wall_s: float
) -> str:
    """Return pytest's own closing line with more in it: `731 passed, 3 skipped (3 no GPU), ... in 31.2s`."""
    reasons = "; ".join(f"{count} {reason}" for reason, count in skips.most_common())
    parts = [f"{part} ({reasons})" if part.endswith(" skipped") and reasons else part for part in counts]
    parts += [left_out] if left_out else []
    return f"{', '.join(parts)}, {tier} tier, seed {seed} in {wall_s:.1f}s"


def reasons_of(skips: Iterable[object]) -> Counter[str]:
    """Count the reasons of skips in pytest's reports."""
    said = (str(skip[2] if isinstance(skip, tuple) else skip) for skip in skips)
    return Counter(text.removeprefix("Skipped").removeprefix(": ").strip() for text in said)
