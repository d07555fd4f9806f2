"""Changes are found, and the tests that they reach: by import, by process or by name, the nearest first."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tiers.changes import KERNEL_TESTS, Changes, find_changes, situation_of
from tests.tiers.reach import Imports


class Repository:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *arguments: str) -> str:
        names = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *names, *arguments], cwd=self.folder, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, file: str) -> str:
        (self.folder / file).write_text(file)
        self.git("add", file)
        self.git("commit", "--quiet", "--message", file)
        return self.git("rev-parse", "--short", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / "origin").mkdir()
    return Repository(tmp_path / "origin")


def test_a_branch_is_compared_with_its_start_on_main(repository: Repository) -> None:
    left = repository.commit("old.py")
    repository.git("checkout", "--quiet", "-b", "branch")
    repository.commit("first.py")
    repository.commit("ä second.py")
    (repository.folder / "untracked.py").touch()
    (repository.folder / "old.py").write_text("changed")
    changes = find_changes(repository.folder)
    assert changes.since == left
    assert changes.files == {"first.py", "ä second.py", "untracked.py", "old.py"}
    assert changes.number == 3


def test_main_is_compared_with_its_last_commit(repository: Repository) -> None:
    repository.commit("old.py")
    before = repository.commit("middle.py")
    repository.commit("last.py")
    assert find_changes(repository.folder).since == before
    assert find_changes(repository.folder).files == {"last.py"}


def test_a_clone_is_compared_with_the_pushed_commit_or_its_last_one(
    repository: Repository, tmp_path: Path
) -> None:
    repository.commit("old.py")
    pushed = repository.commit("pushed.py")
    repository.git("clone", "--quiet", ".", str(tmp_path / "clone"))
    clone = Repository(tmp_path / "clone")
    assert find_changes(clone.folder).files == {"pushed.py"}
    clone.commit("new.py")
    clone.commit("newer.py")
    assert find_changes(clone.folder).since == pushed
    assert find_changes(clone.folder).files == {"new.py", "newer.py"}


def test_a_shallow_clone_of_one_commit_has_nothing_to_compare_with(
    repository: Repository, tmp_path: Path
) -> None:
    repository.commit("old.py")
    repository.commit("new.py")
    repository.git("clone", "--quiet", "--depth", "1", f"file://{repository.folder}", str(tmp_path / "clone"))
    changes = find_changes(tmp_path / "clone")
    assert changes.since == "nothing: HEAD has no parent here"
    assert changes.files == frozenset()
    assert changes.number == int(repository.git("rev-parse", "HEAD"), 16)


def test_a_base_can_be_named(repository: Repository) -> None:
    repository.commit("old.py")
    repository.commit("middle.py")
    repository.commit("last.py")
    assert find_changes(repository.folder, "HEAD~2").files == {"middle.py", "last.py"}
    with pytest.raises(ValueError, match="nowhere is no commit"):
        find_changes(repository.folder, "nowhere")


def test_a_tree_without_git_has_nothing_to_compare_with(tmp_path: Path) -> None:
    assert find_changes(tmp_path).since == "nothing: no Git repository"


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
