"""Runs the services of docker-compose.yml without Docker: their commands, user, mounts and environment.

Each container consists of namespaces with its own address and a read-only root file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.hosts import ROOT, copy_working_tree
from tests.cluster.namespaces import Isolated

NETWORK = "10.78.0."
KERNELS = Path.home() / ".cache" / "tandem"
"""Native kernels that this machine has already built."""
COMPOSE = ROOT / "docker-compose.yml"


def compose(environment: dict[str, str]) -> dict[str, Any]:
    """Return docker-compose.yml with its variables substituted."""

    def value(match: re.Match[str]) -> str:
        return environment.get(match[1]) or match[2]

    text = re.sub(r"\$\{(\w+):-(.*?)\}", value, COMPOSE.read_text())
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def of_dockerfile(instruction: str) -> str:
    """Return the argument of the Dockerfile's last such instruction."""
    text = (ROOT / "deploy/Dockerfile").read_text()
    return re.findall(rf"^{instruction} (.*)$", text, re.MULTILINE)[-1]


class Container(Isolated):
    def __init__(self, name: str, number: int, folder: Path) -> None:
        super().__init__(name, folder / f"{name}.log")
        self.address = f"{NETWORK}{number}"
        self._folder = folder

    def start(self, service: dict[str, Any]) -> None:
        """Start the service's command. It waits for its network."""
        mounts = [_tmpfs(entry) for entry in service["tmpfs"]]
        for volume in service["volumes"]:
            source, target, *mode = volume.split(":")
            path = self._folder / "volumes" / source
            if not path.exists():
                path.mkdir(parents=True, mode=0o700)
                if source == "cache" and KERNELS.is_dir():
                    shutil.copytree(KERNELS, path / "tandem")
                for each in (path, *path.rglob("*")):
                    os.chown(each, 1000, 1000)
            mounts.append(f"bind {target} {path} {mode[0] if mode else 'rw'}")
        (self._folder / f"{self.name}.mounts").write_text("\n".join(sorted(mounts, key=_target)) + "\n")
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        user = of_dockerfile("USER").partition(":")[0]
        command = json.loads(of_dockerfile("ENTRYPOINT")) + service["command"]
        script = str(Path(__file__).with_name("container.sh"))
        given = {name: str(value or "") for name, value in service["environment"].items()}
        of_script = [self.name, str(self._folder), sys.prefix, user, *command]
        self.launch(["bash", script, *of_script], _image_environment() | given)

    def stop(self) -> None:
        """Stop the container like `docker stop`, and return when it has ended."""
        self.init.send_signal(signal.SIGTERM)
        self.process.wait(timeout=40)


class Containers:
    """The services' containers on one bridge, which belongs to the first one's network."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.services = compose(environment)["services"]
        self._folder = folder
        self.running: list[Container] = []
        copy_working_tree(folder / "image")
        (folder / "image" / ".venv").symlink_to(sys.prefix)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{NETWORK}10 router\n")

    def start(self, service: str) -> Container:
        number = len(self.running)
        container = Container(f"{service}-{number}", 10 + number, self._folder)
        self.running.append(container)
        container.start(self.services[service])
        first = self.running[0]
        if container is first:
            first.network("link", "add", "eth0", "type", "bridge")
        else:
            port, pid = f"to-{number}", str(container.init.pid)
            first.network("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
            first.network("link", "set", port, "master", "eth0", "up")
        container.network("address", "add", f"{container.address}/24", "dev", "eth0")
        container.network("link", "set", "eth0", "up")
        return container

    def close(self) -> None:
        for container in self.running:
            container.kill()


def _image_environment() -> dict[str, str]:
    """Return the Dockerfile's environment, with this machine's paths in place of /opt/tandem/.venv."""
    return {
        "PATH": "/opt/tandem/.venv/bin:/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin",
        "HOME": "/home/tandem",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": "/opt/tandem",
        "LANG": "C.UTF-8",
        "HOST_HOME": str(Path.home()),
    }


def _tmpfs(entry: str) -> str:
    """Return the mount options of a tmpfs. Docker mounts them without `exec`."""
    target, _, options = entry.partition(":")
    return f"tmpfs {target} {','.join(filter(None, ['nosuid,nodev,noexec', options]))}"


def _target(mount: str) -> str:
    return mount.split()[1]
