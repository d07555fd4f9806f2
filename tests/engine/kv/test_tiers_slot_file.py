"""The disk tier's files: a reopened folder returns only right blocks, whatever happened to it."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kv.tiers.slot_file import ENTRY_BYTES, CorruptBlockError, SlotFile, claim_folder
from protocol.errors import ConfigError
from tests.engine.tiers_parts import check_blocks, content_of, identity_of, open_file, write_blocks

ROOT = Path(__file__).resolve().parents[3]
BLOCK_BYTES = 1000


def start_child(folder: Path, block_bytes: int, capacity: int, first: int) -> subprocess.Popen[str]:
    """Start a process that writes blocks, numbered from `first`, until it is killed."""
    command = [sys.executable, "-m", "tests.engine.tiers_parts", str(folder)]
    return subprocess.Popen(
        [*command, *map(str, (block_bytes, capacity, first, 0))], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def opened(folder: Path, capacity: int = 8) -> closing[SlotFile]:
    return closing(open_file(folder, BLOCK_BYTES, capacity))


def write_eight(folder: Path) -> None:
    with opened(folder) as file:
        write_blocks(file, range(8))


def test_blocks_are_found_again_in_the_order_of_writing(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        assert file.stored == []
        write_blocks(file, range(5))
        file.write(1, identity_of(9), 100, memoryview(content_of(identity_of(9), BLOCK_BYTES)))
        file.erase(3)
    with opened(tmp_path) as again:
        assert [stored.identity for stored in again.stored] == [identity_of(n) for n in (0, 2, 4, 9)]
        assert check_blocks(again) == 4
        assert (again.num_corrupt, again.num_foreign) == (0, 0)


def test_a_slot_returns_no_other_identity(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        write_blocks(file, range(2))
        with pytest.raises(CorruptBlockError):
            file.read(0, identity_of(1), memoryview(bytearray(BLOCK_BYTES)))
        with pytest.raises(CorruptBlockError):
            file.read(5, identity_of(5), memoryview(bytearray(BLOCK_BYTES)))


def test_the_newer_of_two_equal_blocks_stays(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        content = memoryview(content_of(identity_of(0), BLOCK_BYTES))
        for slot, age in ((4, 7), (2, 9), (6, 8)):
            file.write(slot, identity_of(0), age, content)
    for _ in range(2):
        with opened(tmp_path) as again:
            assert [(stored.age, stored.slot) for stored in again.stored] == [(9, 2)]


def test_a_smaller_capacity_frees_room(tmp_path: Path) -> None:
    write_eight(tmp_path)
    with opened(tmp_path, 3) as smaller:
        assert check_blocks(smaller) == 3
        assert (tmp_path / "worker-0" / "blocks").stat().st_size == 3 * BLOCK_BYTES
        assert (tmp_path / "worker-0" / "index").stat().st_size == 4 * ENTRY_BYTES
    with opened(tmp_path) as larger:
        assert check_blocks(larger) == 3


@pytest.mark.parametrize(
    ("block_bytes", "model"), [(BLOCK_BYTES, b"another model..."), (500, b"sixteen bytes...")]
)
def test_another_models_files_are_emptied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, block_bytes: int, model: bytes
) -> None:
    write_eight(tmp_path)
    other = open_file(tmp_path, block_bytes, 8, model)
    assert other.stored == []
    assert (other.num_foreign, other.num_corrupt) == (1, 0)
    assert str(tmp_path) in caplog.text
    assert (tmp_path / "worker-0" / "blocks").stat().st_size == 0
    write_blocks(other, range(2))
    other.close()
    again = open_file(tmp_path, block_bytes, 8, model)
    assert check_blocks(again) == 2
    again.close()


DAMAGE = st.tuples(
    st.sampled_from(["index", "blocks"]),
    st.sampled_from(["flip", "cut", "zero", "garbage", "append", "remove"]),
    st.integers(0, 2**32),
)


def inflict(path: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    raw = bytearray(path.read_bytes()) if path.exists() else bytearray()
    place = rng.randrange(len(raw) + 1)
    if kind == "flip" and raw:
        raw[place % len(raw)] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del raw[place:]
    elif kind == "zero":
        raw[place : place + 200] = bytes(len(raw[place : place + 200]))
    elif kind == "garbage":
        raw[place : place + 300] = rng.randbytes(len(raw[place : place + 300]))
    elif kind == "append":
        raw += rng.randbytes(rng.randrange(2000))
    path.unlink(missing_ok=True)
    if kind != "remove":
        path.touch(0o600)
        path.write_bytes(raw)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(damages=st.lists(DAMAGE, min_size=1, max_size=3))
def test_damaged_blocks_are_never_returned(
    tmp_path_factory: pytest.TempPathFactory, damages: list[tuple[str, str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    write_eight(folder)
    for name, kind, seed in damages:
        inflict(folder / "worker-0" / name, kind, seed)
    with opened(folder) as damaged:
        into = bytearray(BLOCK_BYTES)
        for stored in damaged.stored:
            try:
                damaged.read(stored.slot, stored.identity, memoryview(into))
            except CorruptBlockError:
                damaged.erase(stored.slot)
                continue
            assert into == content_of(stored.identity, BLOCK_BYTES)
    with opened(folder) as repaired:
        check_blocks(repaired)


def test_a_flipped_bit_is_detected_and_a_truncation_is_counted(tmp_path: Path) -> None:
    write_eight(tmp_path)
    blocks = tmp_path / "worker-0" / "blocks"
    raw = bytearray(blocks.read_bytes())
    raw[2 * BLOCK_BYTES + 17] ^= 4
    blocks.write_bytes(raw[: 7 * BLOCK_BYTES - 1])
    with opened(tmp_path) as damaged:
        assert [stored.slot for stored in damaged.stored] == list(range(6))
        assert damaged.num_corrupt == 2
        with pytest.raises(CorruptBlockError, match="slot 2 holds other bytes"):
            check_blocks(damaged)


def test_a_process_killed_during_a_write_leaves_only_whole_blocks(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    block_bytes, capacity = 2 << 20, 6
    for turn in range(20):
        child = start_child(tmp_path, block_bytes, capacity, turn * 1_000_000)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.03))
        child.kill()
        child.communicate()
        file = open_file(tmp_path, block_bytes, capacity)
        assert file.path.name == "worker-0"
        assert check_blocks(file) >= 1
        assert (file.num_corrupt, file.num_foreign) == (0, 0)
        file.close()


def test_two_processes_share_a_path_but_no_folder(tmp_path: Path) -> None:
    child = start_child(tmp_path, BLOCK_BYTES, 4, 0)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    with opened(tmp_path, 4) as ours:
        assert ours.path.name == "worker-1"
    child.kill()
    child.communicate()
    with opened(tmp_path, 4) as theirs:
        assert theirs.path.name == "worker-0"
        assert check_blocks(theirs) >= 1


def test_one_process_claims_two_folders_and_releases_them(tmp_path: Path) -> None:
    first, second = claim_folder(tmp_path), claim_folder(tmp_path)
    assert [first.path.name, second.path.name] == ["worker-0", "worker-1"]
    first.release()
    third = claim_folder(tmp_path)
    assert third.path.name == "worker-0"
    assert not os.get_inheritable(third.lock_fd)
    second.release(), third.release()
    with open(tmp_path / "worker-0" / "lock") as free:
        fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    """Another user who made it first could put blocks into it."""
    claim_folder(tmp_path).release()
    (tmp_path / "worker-0").chmod(0o777)
    with pytest.raises(ConfigError, match=r"--kv-disk-path: .* written by others"):
        claim_folder(tmp_path)


@pytest.mark.parametrize("name", ["lock", "index", "blocks"])
@pytest.mark.parametrize("how", ["mode", "link"])
def test_a_file_of_another_user_is_refused(tmp_path: Path, name: str, how: str) -> None:
    open_file(tmp_path, BLOCK_BYTES, 8).close()
    file = tmp_path / "worker-0" / name
    if how == "mode":
        file.chmod(0o666)
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((ConfigError, PermissionError), match=f"{name} .*(mode 666|is a symbolic link)"):
        open_file(tmp_path, BLOCK_BYTES, 8)


def on_small_disk(folder: Path, commands: str) -> subprocess.CompletedProcess[str]:
    """Run shell commands with a file system of 1 MiB in `folder`."""
    script = f"mount -t tmpfs -o size=1m tmpfs {folder} && {commands}"
    return subprocess.run(["unshare", "-rm", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True)


def test_a_full_disk_is_counted_and_survived(tmp_path: Path) -> None:
    if on_small_disk(tmp_path, "true").returncode != 0:
        pytest.skip("this host gives no mount namespace of one's own")
    child = f"{sys.executable} -m tests.engine.tiers_parts {tmp_path} 65536 16 0 40"
    # Another file takes 600 KiB of 1 MiB, so the tier has room for 6 of its 16 blocks.
    result = on_small_disk(tmp_path, f"head -c 600k /dev/zero > {tmp_path}/other && {child} && {child}")
    assert result.returncode == 0, result.stderr
    first, second = (json.loads(line) for line in result.stdout.splitlines() if line != "ready")
    assert first["written_blocks"] + first["dropped_blocks"] == 40
    assert first["io_errors"] == first["dropped_blocks"] > 0
    assert first["evicted_blocks"] >= 20  # it continues with the room that it has
    assert second["written_blocks"] >= 30
    assert second["corrupt_blocks"] == 0
    assert "No space left on device" in result.stderr
