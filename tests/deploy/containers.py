"""Runs services of docker-compose.yml and pods without an engine: their commands, user, mounts and variables.

Each container consists of namespaces with its own address and a read-only root file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.hosts import ROOT, Isolated, copy_working_tree

NETWORK = "10.78.0."
KERNELS = Path.home() / ".cache" / "tandem"
"""Native kernels that this machine has already built."""
COMPOSE = ROOT / "docker-compose.yml"
EMPTY_DIR = "empty-"
"""The beginning of the source of a volume that each container has for itself."""


def compose(given: Mapping[str, str], file: Path = COMPOSE) -> dict[str, Any]:
    """Return a Compose file as Compose reads it with the `given` variables of the shell or of .env."""
    text = re.sub(r"\$\{(\w+):-(.*?)\}", lambda match: given.get(match[1]) or match[2], file.read_text())
    found: dict[str, Any] = yaml.safe_load(text)
    for service in found["services"].values():
        variables = service.get("environment", {})
        passed = {name: given.get(name) if value is None else value for name, value in variables.items()}
        service["environment"] = {name: value for name, value in passed.items() if value is not None}
    return found


def pod_service(pod: dict[str, Any]) -> dict[str, Any]:
    """Return a pod as a service of a Compose file."""
    (container,) = pod["containers"]
    kinds = {volume["name"]: volume for volume in pod["volumes"]}
    volumes = []
    for mount in container["volumeMounts"]:
        if mount["mountPath"] == "/dev/shm":
            continue  # each container has one
        source = (EMPTY_DIR if "emptyDir" in kinds[mount["name"]] else "") + mount["name"]
        volumes.append(f"{source}:{mount['mountPath']}:{'ro' if mount.get('readOnly') else 'rw'}")
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    confined = container["securityContext"]
    return {
        "command": container["args"],
        "environment": variables,
        "volumes": volumes,
        "tmpfs": [],
        "read_only": confined["readOnlyRootFilesystem"],
        "cap_drop": confined["capabilities"]["drop"],
    }


def of_dockerfile(instruction: str) -> str:
    """Return the argument of the Dockerfile's last such instruction."""
    text = (ROOT / "deploy/Dockerfile").read_text()
    return re.findall(rf"^{instruction} (.*)$", text, re.MULTILINE)[-1]


def make_volume(folder: Path, source: str, target: str) -> Path:
    """Return the folder of a volume, which the containers' user owns. A cache has this machine's kernels."""
    path = folder / "volumes" / source
    if not path.exists():
        path.mkdir(parents=True, mode=0o700)
        caches = {"/home/tandem": ".cache/tandem", "/home/tandem/.cache": "tandem", "/models": "cache/tandem"}
        cache = caches.get(target)
        if cache and KERNELS.is_dir():
            (path / cache).mkdir(parents=True)
            for kernel in KERNELS.glob("*.so"):
                shutil.copy(kernel, path / cache)
        for each in (path, *path.rglob("*")):
            os.chown(each, 1000, 1000)
    return path


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
            path = make_volume(self._folder, source.replace(EMPTY_DIR, f"{self.name}-"), target)
            mounts.append(f"bind {target} {path} {mode[0] if mode else 'rw'}")
        (self._folder / f"{self.name}.mounts").write_text("\n".join(sorted(mounts, key=_target)) + "\n")
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        user = of_dockerfile("USER").partition(":")[0]
        command = service.get("entrypoint", json.loads(of_dockerfile("ENTRYPOINT"))) + service["command"]
        script = str(Path(__file__).with_name("container.sh"))
        given = {name: str(value) for name, value in service["environment"].items()}
        of_script = [self.name, str(self._folder), sys.prefix, user, *command]
        self.launch(["bash", script, *of_script], _image_environment() | given)

    def stop(self) -> None:
        """Stop the container like `docker stop`, and return when it has ended."""
        self.init.send_signal(signal.SIGTERM)
        self.process.wait(timeout=40)


class Containers:
    """The services' containers on one bridge, which belongs to the first one's network. The router is
    number 0.
    """

    def __init__(self, folder: Path, services: dict[str, Any]) -> None:
        self.services = services
        self._folder = folder
        self.running: list[Container] = []
        copy_working_tree(folder / "image")
        (folder / "image" / ".venv").symlink_to(sys.prefix)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{NETWORK}10 router\n")

    def start(self, service: str, number: int | None = None) -> Container:
        """Start a service's container with the next number, or in the place of one that was killed."""
        links = len(self.running)
        number = links if number is None else number
        container = Container(f"{service}-{number}", 10 + number, self._folder)
        self.running.append(container)
        container.start(self.services[service])
        first = self.running[0]
        if container is first:
            first.network("link", "add", "eth0", "type", "bridge")
        else:
            port, pid = f"to-{links}", str(container.init.pid)
            first.network("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
            first.network("link", "set", port, "master", "eth0", "up")
        container.network("address", "add", f"{container.address}/24", "dev", "eth0")
        container.network("link", "set", "eth0", "up")
        return container

    def close(self) -> None:
        for container in self.running:
            container.kill()


def _image_environment() -> dict[str, str]:
    """Return the Dockerfile's environment."""
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
