"""The launcher's directory is private, and a later launcher removes it if its owner was killed."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.processes import PrivateDirectory
from tests.deploy.server_process import ROOT

OWNER = "from deploy.processes import PrivateDirectory; print(PrivateDirectory().path, flush=True); input()"


@pytest.fixture
def own() -> Iterator[PrivateDirectory]:
    directory = PrivateDirectory()
    yield directory
    directory.remove()


def test_the_directory_is_private(own: PrivateDirectory) -> None:
    assert own.path.stat().st_mode & 0o777 == 0o700
    own.remove()
    assert not own.path.exists()


def test_a_killed_owners_directory_is_removed_and_a_living_ones_stays(own: PrivateDirectory) -> None:
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    paths = []
    for owner in owners:
        assert owner.stdout is not None
        paths.append(Path(owner.stdout.readline().strip()))
    owners[0].kill()
    owners[0].wait()
    later = PrivateDirectory()
    assert [path.exists() for path in paths] == [False, True]
    assert own.path.exists()
    later.remove()
    owners[1].communicate("\n")
    PrivateDirectory().remove()
    assert not paths[1].exists()


def test_a_users_files_are_left_alone(own: PrivateDirectory) -> None:
    """The name looks like ours, but its number belongs to no process and proves nothing."""
    theirs = own.path.parent / f"tandem-{2**30}-{uuid.uuid4().hex}"
    theirs.mkdir()
    (theirs / "results.json").write_text("{}")
    try:
        PrivateDirectory().remove()
        assert (theirs / "results.json").read_text() == "{}"
    finally:
        (theirs / "results.json").unlink()
        theirs.rmdir()
