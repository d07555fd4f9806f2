"""Hosts in network namespaces of their own, joined by a router whose links can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/run/netns")


def enter(network: str) -> None:
    """Move the calling thread, and those that it starts, into a namespace. An empty name: stay here."""
    if not network:
        return
    descriptor = os.open(_FOLDER / network, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")
    finally:
        os.close(descriptor)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


def _free_subnet() -> int:
    """The third byte of a /22 that no other test, which may run beside this one, has joined."""
    routes = _ip("-4", "route", "show")
    return secrets.choice([byte for byte in range(0, 240, 4) if f"10.222.{byte}.0/22" not in routes])


class Network:
    """Namespaces `left` and `right`, and with `joined` this process's own too; `close` removes them.

    `cut` loses every packet from one of them to another and tells nobody, `unplug` takes a link down.
    """

    def __init__(self, joined: bool = False) -> None:
        name, self._subnet = f"tnd{secrets.token_hex(3)}", _free_subnet()
        self._own_wire = f"{name}3"
        self._router, self.left, self.right = f"{name}m", f"{name}l", f"{name}r"
        self.hosts = {self.left: self._host(1), self.right: self._host(2), "": self._host(3)}
        try:
            for network in (self._router, self.left, self.right):
                _ip("netns", "add", network)
                _ip("-n", network, "link", "set", "lo", "up")
            _ip("netns", "exec", self._router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            for number, network in enumerate([self.left, self.right, *([""] if joined else [])], 1):
                self._join(number, network, f"{name}{number}")
        except BaseException:
            self.close()
            raise

    def cut(self, source: str, target: str) -> None:
        self._rule("add", source, target)

    def mend(self, source: str, target: str) -> None:
        self._rule("del", source, target)

    def unplug(self, network: str) -> None:
        _ip("-n", self._router, "link", "set", self._port(network), "down")

    def plug_in(self, network: str) -> None:
        _ip("-n", self._router, "link", "set", self._port(network), "up")

    def close(self) -> None:
        subprocess.run(["ip", "link", "del", self._own_wire], capture_output=True, timeout=20)
        for network in (self.left, self.right, self._router):
            subprocess.run(["ip", "netns", "del", network], capture_output=True, timeout=20)

    def _host(self, number: int) -> str:
        return f"10.222.{self._subnet + number}.2"

    def _port(self, network: str) -> str:
        return f"to{list(self.hosts).index(network) + 1}"

    def _join(self, number: int, network: str, wire: str) -> None:
        inside = ["-n", network] if network else []
        subnet = f"10.222.{self._subnet + number}"
        _ip("-n", self._router, "link", "add", f"to{number}", "type", "veth", "peer", "name", wire)
        _ip("-n", self._router, "link", "set", wire, "netns", network or str(os.getpid()))
        _ip("-n", self._router, "addr", "add", f"{subnet}.1/24", "dev", f"to{number}")
        _ip(*inside, "addr", "add", f"{subnet}.2/24", "dev", wire)
        _ip(*inside, "link", "set", wire, "up")
        _ip("-n", self._router, "link", "set", f"to{number}", "up")
        _ip(*inside, "route", "add", f"10.222.{self._subnet}.0/22", "via", f"{subnet}.1")

    def _rule(self, verb: str, source: str, target: str) -> None:
        where = ["from", self.hosts[source], "to", self.hosts[target]]
        _ip("-n", self._router, "rule", verb, *where, "priority", "10", "blackhole")


def why_not() -> str:
    """Why no networks can be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    with contextlib.ExitStack() as undo:
        try:
            network = Network()
            undo.callback(network.close)
            network.cut(network.left, network.right)
        except subprocess.CalledProcessError as error:
            return f"no network namespaces can be made: {error.stderr.strip()}"
    return ""
