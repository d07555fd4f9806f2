"""Makes hosts with their own addresses on one machine by namespaces: a laptop, and a cluster behind SSH."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("unshare", "nsenter", "ip", "sshd", "rsync", "setpriv")
NETWORK = "10.77.0."
START_S = 20.0
_USER_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def why_not() -> str:
    """Return why this machine cannot make such hosts, or an empty string if it can."""
    if os.geteuid() != 0:
        return "making hosts needs root"
    missing = [program for program in PROGRAMS if shutil.which(program, path=_USER_PATH) is None]
    if missing:
        return f"making hosts needs {', '.join(missing)}"
    probe = ["unshare", "--net", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"making hosts: {done.stderr.strip()}"


class Isolated:
    """A process tree with its own network, mounts, processes and host name. It ends with this process."""

    process: subprocess.Popen[bytes]
    init: psutil.Process

    def __init__(self, name: str, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path

    def launch(self, command: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None) -> None:
        """Start the command and return when it runs. Its network has only the loopback device."""
        isolate = ["setpriv", "--pdeathsig", "KILL", "unshare"]
        isolate += ["--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        with self.log_path.open("wb") as output:
            self.process = subprocess.Popen(
                [*isolate, *command],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        wait_until(lambda: bool(psutil.Process(self.process.pid).children()), START_S, lambda: self.log)
        self.init = psutil.Process(self.process.pid).children()[0]
        self.network("link", "set", "lo", "up")

    def network(self, *command: str) -> None:
        """Run `ip` in this network. Works before the process has made its mounts, too."""
        inside = ("nsenter", "-n", "-t", str(self.init.pid), "--", "ip", *command)
        subprocess.run(inside, check=True, capture_output=True)

    def run(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command as root inside the namespaces."""
        namespaces = ["nsenter", "-a", "-t", str(self.init.pid), "--"]
        return subprocess.run(
            [*namespaces, *command], capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def kill(self) -> None:
        """Kill all processes inside at once, which also removes the network."""
        if hasattr(self, "process"):
            with contextlib.suppress(psutil.NoSuchProcess, AttributeError):
                self.init.kill()
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


class Host(Isolated):
    """A machine of the simulated network: a namespace with an SSH server."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        super().__init__(name, folder / f"{name}.log")
        self.address = f"{NETWORK}{number}"
        self._folder = folder / name
        self._folder.mkdir()
        for each in ("key", "key.pub"):
            shutil.copy(folder / each, self._folder)

    def start(self) -> None:
        """Power the host on. It waits for its network, then listens for SSH."""
        script = str(Path(__file__).with_name("host.sh"))
        environment = {"PATH": _USER_PATH, "LANG": "C.UTF-8", "HOME": str(Path.home())}
        self.launch(["bash", script, self.name, str(self._folder), sys.prefix], environment, cwd=ROOT)

    def wait_ready(self) -> None:
        wait_until(
            lambda: self.run("ss", "-Hltn", "sport", "=", ":22").stdout != "", START_S, lambda: self.log
        )

    @property
    def is_up(self) -> bool:
        return self.process.poll() is None

    def run_as_user(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command in a login shell of the cluster's user."""
        return self.run("su", "-", "tandem", "-c", shlex.join(command), timeout_s=timeout_s)

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of the cluster's user."""
        return [each for each in self.init.children(recursive=True) if _is_users(each)]

    def ports(self) -> list[str]:
        """Return the addresses that processes of the user listen on."""
        lines = self.run("ss", "-H", "-t", "-l", "-n").stdout.splitlines()
        return [address for line in lines if not (address := line.split()[3]).endswith(":22")]

    def read(self, path: str) -> str:
        return self.run("cat", path).stdout


class Hosts:
    """A laptop with the working tree, and a cluster on the laptop's bridge. No host has a default route."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
        self.laptop = Host("laptop", 1, folder)
        self.others = [Host(name, 10 + i, folder) for i, name in enumerate(names)]
        copy_working_tree(folder / "laptop" / "source")
        try:
            for host in (self.laptop, *self.others):
                host.start()
            self.laptop.network("link", "add", "eth0", "type", "bridge")
            for host in (self.laptop, *self.others):
                self._connect(host)
            for host in (self.laptop, *self.others):
                host.wait_ready()
        except BaseException:
            self.close()
            raise

    def lose(self, host: Host) -> None:
        """Take a host's link down, then kill the host."""
        self.laptop.network("link", "set", f"to-{host.name}", "down")
        host.kill()

    def close(self) -> None:
        for host in (self.laptop, *self.others):
            host.kill()

    def _connect(self, host: Host) -> None:
        if host is not self.laptop:
            port, pid = f"to-{host.name}", str(host.init.pid)
            self.laptop.network("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
            self.laptop.network("link", "set", port, "master", "eth0", "up")
        host.network("address", "add", f"{host.address}/24", "dev", "eth0")
        host.network("link", "set", "eth0", "up")


def _is_users(process: psutil.Process) -> bool:
    """Tell whether a process is the user's. SSH's own processes, which outlive a command, do not count."""
    try:
        runs = process.status() != psutil.STATUS_ZOMBIE and process.name() != "sshd"
        return runs and process.uids().real >= 1000
    except psutil.NoSuchProcess:
        return False


def copy_working_tree(target: Path) -> None:
    """Copy the files that git tracks, or would track, in their present state."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, capture_output=True, check=True).stdout
    copy = ["rsync", "-a", "--from0", "--files-from=-", "--ignore-missing-args", f"{ROOT}/", f"{target}/"]
    subprocess.run(copy, input=files, check=True)
