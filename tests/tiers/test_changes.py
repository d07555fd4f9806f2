"""Changes are the differences, committed or not, from the commit at which a branch left main."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.tiers.changes import find_changes


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
