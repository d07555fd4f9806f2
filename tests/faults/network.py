"""Makes network namespaces that act as hosts, joined by a router whose links can be slowed and cut."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.packet_relay import DEVICE

_CLONE_NEWNET = 0x40000000
_FOLDER = Path("/run/netns")
_CHECKOUT = Path(__file__).resolve().parents[2]
_RELAYED = "100"
"""The router's routing table to a packet relay."""


def enter(network: str) -> None:
    """Move the calling thread, and threads that it starts, into a namespace. An empty name does nothing."""
    if not network:
        return
    descriptor = os.open(_FOLDER / network, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")
    finally:
        os.close(descriptor)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _free_subnet() -> int:
    """Return the third byte of a /22 that no other test running now uses."""
    routes = _ip("-4", "route", "show")
    return secrets.choice([byte for byte in range(0, 240, 4) if f"10.222.{byte}.0/22" not in routes])


class Network:
    """Namespaces `left` and `right`, and with `joined` also this process's own; `close` removes them.

    `cut` drops every packet between two of them without an error, `unplug` takes a link down. Packets have
    at most `mtu` bytes.
    """

    def __init__(self, joined: bool = False, mtu: int = 1500) -> None:
        name, self._subnet = f"tnd{secrets.token_hex(3)}", _free_subnet()
        self._mtu = str(mtu)
        self._wires = [f"{name}{number}" for number in (1, 2, 3)]
        self._router, self.left, self.right = f"{name}m", f"{name}l", f"{name}r"
        self._leads_through_relay = False
        self.hosts = {self.left: self._host(1), self.right: self._host(2), "": self._host(3)}
        try:
            for network in (self._router, self.left, self.right):
                _ip("netns", "add", network)
                _ip("-n", network, "link", "set", "lo", "up")
            _ip("netns", "exec", self._router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            for number, network in enumerate([self.left, self.right, *([""] if joined else [])], 1):
                self._join(number, network, self._wires[number - 1])
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
        """Bring the link up and flush the neighbour tables, which would refuse packets for another second."""
        _ip("-n", self._router, "link", "set", self._port(network), "up")
        for host in (self._router, network):
            _ip("-n", host, "neigh", "flush", "all")

    @contextlib.contextmanager
    def slowed(self, rate: str) -> Iterator[None]:
        """Limit the sending rate of left and right, in the syntax of `tc`, such as "1gbit"."""
        ends = list(zip((self.left, self.right), self._wires, strict=False))
        for network, wire in ends:
            shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
            _run("tc", "-n", network, "qdisc", "add", "dev", wire, *shape)
        yield
        for network, wire in ends:
            _run("tc", "-n", network, "qdisc", "del", "dev", wire, "root")

    @contextlib.contextmanager
    def relayed(self, delay_s: float, loss: float) -> Iterator[Callable[[], int]]:
        """Delay packets each way and drop a share, until the yielded function returns their number."""
        program = [sys.executable, "-m", "tests.faults.packet_relay", str(delay_s), str(loss), self._mtu]
        relay = subprocess.Popen(
            ["ip", "netns", "exec", self._router, *program],
            cwd=_CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def end() -> int:
            return int(relay.communicate(timeout=20)[0])

        assert relay.stdout is not None
        try:
            if relay.stdout.readline() != "ready\n":
                raise RuntimeError("the packet relay does not start")
            self._lead_through_relay()
            yield end
        finally:
            if relay.poll() is None:
                end()

    def _lead_through_relay(self) -> None:
        """Route packets through the relay and, once they come from it or it is gone, the usual way."""
        _ip("-n", self._router, "route", "add", "default", "dev", DEVICE, "table", _RELAYED)
        if self._leads_through_relay:
            return
        self._leads_through_relay = True
        add = ["-n", self._router, "rule", "add"]
        _ip(*add, "iif", DEVICE, "lookup", "main", "priority", "5")
        ends = self.hosts[self.left], self.hosts[self.right]
        for source, target in (ends, ends[::-1]):
            _ip(*add, "from", source, "to", target, "lookup", _RELAYED, "priority", "20")

    def close(self) -> None:
        subprocess.run(["ip", "link", "del", self._wires[2]], capture_output=True, timeout=20)
        for network in (self.left, self.right, self._router):
            subprocess.run(["ip", "netns", "del", network], capture_output=True, timeout=20)

    def _host(self, number: int) -> str:
        return f"10.222.{self._subnet + number}.2"

    def _port(self, network: str) -> str:
        return f"to{list(self.hosts).index(network) + 1}"

    def _join(self, number: int, network: str, wire: str) -> None:
        inside = ["-n", network] if network else []
        subnet = f"10.222.{self._subnet + number}"
        peer = ["type", "veth", "peer", "name", wire, "mtu", self._mtu]
        _ip("-n", self._router, "link", "add", f"to{number}", "mtu", self._mtu, *peer)
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
    """Return why networks cannot be made here, or an empty string."""
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
