"""Sockets listen on one of several ports; without a free one the error says so."""

from __future__ import annotations

import socket

import pytest
import zmq

from kvtransfer.transports.transport import connect_tcp, listen_tcp
from messaging.sockets import ClusterKeys, bind_router
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.ports import ANY_PORT, router_ports, worker_ports

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
