"""Ids, addresses and ports by which processes know each other."""

from __future__ import annotations

import socket

import pytest
import zmq

from kvtransfer.transports.transport import connect_tcp, listen_tcp
from messaging.sockets import ClusterKeys, bind_router
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.ids import (
    block_identities,
    child_identity,
    new_incarnation,
    new_request_id,
    root_identity,
    token_ids_digest,
)
from protocol.ports import ANY_PORT, router_ports, worker_ports

TOKENS = [*range(40), 2**31 - 1, 151_935, 0, 0, 7, 7, 7, 7]
CHAIN = [
    "7f39ac7db99274fa03797b9374f59df8",
    "45821f138dce5ac16cf561f5fd130509",
    "ca7ed322d00d187383b9c804ddd41fa0",
]
ROOT = "f0e8ebc9f3e94588781ed44fe6aaf33e"
DIGEST = "ec6ab2e0e9ec4853bdabf150217f05e6"


def test_a_known_chain():
    """This value must never change, or blocks cached by older processes would not be found."""
    root = root_identity("tandem-code-10m", "bfloat16", "salt")
    assert root.hex() == ROOT
    assert [identity.hex() for identity in block_identities(root, TOKENS, 16)] == CHAIN
    assert token_ids_digest(TOKENS).hex() == DIGEST


def test_a_partial_block_has_no_identity():
    root = root_identity("m", "f")
    assert list(block_identities(root, list(range(15)), 16)) == []
    two = list(block_identities(root, list(range(33)), 16))
    assert len(two) == 2
    assert two == list(block_identities(root, list(range(40)), 16))[:2]


def test_everything_that_distinguishes_blocks_changes_the_identity():
    roots = {
        root_identity("m", "f"),
        root_identity("m", "f", "s"),
        root_identity("m", "g"),
        root_identity("n", "f"),
        root_identity("mf", ""),
        root_identity("", "mf"),
        root_identity("m", "", "f"),
        root_identity("m", "f", adapter="s"),
        root_identity("m", "f", "s", adapter="a"),
        root_identity("m", "f", "s", adapter="b"),
    }
    assert len(roots) == 10
    root = root_identity("m", "f")
    assert child_identity(root, [1, 2]) != child_identity(root, [2, 1])
    assert child_identity(root, [1, 2]) != child_identity(child_identity(root, [1]), [2])
    assert child_identity(root, [256]) != child_identity(root, [0, 1])
    assert all(len(identity) == 16 for identity in roots)


def test_fresh_ids_do_not_repeat():
    assert len({new_incarnation() for _ in range(1000)} | {new_request_id("r") for _ in range(1000)}) == 2000


HOST = "127.0.0.1"


@pytest.fixture
def ports() -> range:
    """Return three ports that were free a moment ago."""
    for low in range(20_000, 30_000, 3):
        try:
            for port in range(low, low + 3):
                socket.create_server((HOST, port)).close()
        except OSError:
            continue
        return range(low, low + 3)
    pytest.fail("no three free ports in a row")


def test_sockets_share_a_range_until_it_is_used_up(ports: range) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listeners = [listen_tcp(HOST, ports) for _ in range(2)]
    _, endpoint = bind_router(context, ClusterKeys.generate(), HOST, ports)
    taken = [address.rpartition(":")[2] for address in (endpoint, *(address for _, address in listeners))]
    assert sorted(map(int, taken)) == list(ports)
    for more in (
        lambda: listen_tcp(HOST, ports),
        lambda: bind_router(context, ClusterKeys.generate(), HOST, ports),
    ):
        with pytest.raises(ConfigError, match=f"--worker-ports: {ports[0]}-{ports[-1]} are all taken"):
            more()
    listener, address = listeners[0]
    listener.close()
    again, found = listen_tcp(HOST, ports)
    assert found == address
    for each in (again, listeners[1][0]):
        each.close()
    context.destroy(linger=0)


def test_a_port_is_free_at_once_after_its_connections(ports: range) -> None:
    listener, address = listen_tcp(HOST, ports[:1])
    with connect_tcp(address) as client:
        accepted, _ = listener.accept()
        accepted.close()  # first, so that this end keeps the port in TIME_WAIT
        client.setblocking(True)
        assert client.recv(1) == b""
    listener.close()
    listener, _ = listen_tcp(HOST, ports[:1])
    listener.close()


def test_other_errors_are_raised_unchanged() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        listen_tcp("192.0.2.1", range(20_000, 20_003))


def test_routers_have_the_first_ports() -> None:
    config = ServeConfig(worker_ports="6500-6509", router_replicas=2)
    assert (list(router_ports(config)), list(worker_ports(config))) == ([6500, 6501], list(range(6502, 6510)))
    assert router_ports(ServeConfig()) == worker_ports(ServeConfig()) == ANY_PORT


@pytest.mark.parametrize("text", ["", "6500", "6500-6499", "0-10", "65000-65536", "a-b", "-1-5", "6500-6500"])
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--worker-ports: "):
        worker_ports(ServeConfig(worker_ports=text))
