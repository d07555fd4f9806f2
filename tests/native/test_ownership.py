"""Files of other users, and files that others can write or read, are refused."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from native import build
from native.ownership import OwnershipError, check_own, check_private, open_own, read_own

OURS, THEIRS = 1000, 1001
Opener = Callable[[Path], object]


def opened(path: Path, **options: bool) -> None:
    os.close(open_own(path, os.O_RDWR, **options))


def opened_in_the_open(path: Path) -> None:
    opened(path, private=False)


def read_secret(path: Path) -> None:
    read_own(path, private=True)


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that makes each file appear to belong to a user and a group."""
    fstat, stat = os.fstat, os.stat

    def owned(status: os.stat_result, owner: int, group: int) -> os.stat_result:
        return os.stat_result([*status[:4], owner, group, *status[6:]])

    def make(owner: int, group: int = 77) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: OURS)
        monkeypatch.setattr(os, "fstat", lambda fd: owned(fstat(fd), owner, group))
        monkeypatch.setattr(os, "stat", lambda path, **how: owned(stat(path, **how), owner, group))

    return make


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("x")
    path.chmod(0o600)
    return path


EVERY: tuple[Opener, ...] = (opened, opened_in_the_open, read_own, read_secret, check_own, check_private)


@pytest.mark.parametrize("opener", EVERY)
def test_another_users_file_is_refused(file: Path, as_user: Callable[..., None], opener: Opener) -> None:
    for owner in (OURS, 0):
        as_user(owner)
        opener(file)
    as_user(THEIRS)
    with pytest.raises(OwnershipError, match=f"file belongs to user {THEIRS}"):
        opener(file)


@pytest.mark.parametrize("opener", EVERY)
@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_a_file_that_others_can_write_is_refused(
    file: Path, as_user: Callable[..., None], opener: Opener, mode: int
) -> None:
    as_user(OURS)
    file.chmod(mode)
    with pytest.raises(OwnershipError, match=rf"file.*\(mode {mode:o}\)"):
        opener(file)


@pytest.mark.parametrize("opener", [opened, read_secret, check_private])
@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_secret_that_others_can_read_is_refused(
    file: Path, as_user: Callable[..., None], opener: Opener, mode: int
) -> None:
    as_user(OURS)
    file.chmod(mode)
    with pytest.raises(OwnershipError, match=rf"\(mode {mode:o}\): chmod 600"):
        opener(file)
    check_own(file)
    read_own(file)


@pytest.mark.parametrize("opener", [opened, opened_in_the_open, read_own, read_secret, check_private])
def test_a_path_that_is_no_file_is_refused_at_once(tmp_path: Path, opener: Opener) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is no file"):
        opener(tmp_path / "pipe")
    with pytest.raises(OSError):
        opener(tmp_path)


@pytest.mark.parametrize("opener", [opened, opened_in_the_open, check_private])
def test_a_write_follows_no_link(tmp_path: Path, file: Path, opener: Opener) -> None:
    """Another user may have put a link into the folder first."""
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(OwnershipError, match="link is a symbolic link"):
        opener(tmp_path / "link")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    with pytest.raises(OwnershipError, match="is a symbolic link"):
        open_own(tmp_path / "dangling", os.O_RDWR | os.O_CREAT)
    assert not (tmp_path / "none").exists()


def test_a_secret_may_be_read_through_a_link(tmp_path: Path, file: Path) -> None:
    """Kubernetes mounts secrets as links."""
    (tmp_path / "link").symlink_to(file)
    assert read_own(tmp_path / "link", private=True) == b"x"


def test_the_group_may_read_roots_secrets(file: Path, as_user: Callable[..., None]) -> None:
    """Kubernetes mounts secrets this way."""
    as_user(0)
    file.chmod(0o440)
    assert read_own(file, private=True) == b"x"
    file.chmod(0o444)
    with pytest.raises(OwnershipError, match="others can read"):
        read_own(file, private=True)


@pytest.mark.parametrize(
    ("name", "members", "is_own"),
    [("alice", [], True), ("alice", ["alice"], True), ("alice", ["bob"], False), ("users", [], False)],
)
def test_the_users_own_group_may_write(
    file: Path,
    as_user: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    members: list[str],
    is_own: bool,
) -> None:
    as_user(OURS, 77)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="alice", pw_gid=77))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=name, gr_mem=members))
    file.chmod(0o664)
    if is_own:
        assert read_own(file) == b"x"
    else:
        with pytest.raises(OwnershipError, match="written by others"):
            read_own(file)


def test_torchs_compiled_files_lie_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    for as_torch_leaves_it in ("", str(default_cache_dir())):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", as_torch_leaves_it)
        build.own_inductor_cache()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    assert (tmp_path / "cache" / "inductor").stat().st_mode & 0o777 == 0o700
    planted = tmp_path / "torchinductor_us"
    planted.mkdir()
    planted.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(planted))
    with pytest.raises(OwnershipError, match="torchinductor_us can be written by others"):
        build.own_inductor_cache()
