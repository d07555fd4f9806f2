"""ZeroMQ sockets of a cluster, encrypted and authenticated with CURVE. Every wait has a limit.

The package's `__init__` does not import this module, so the engine needs no ZeroMQ.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from protocol.codec import MAX_MESSAGE_BYTES
from protocol.ports import ANY_PORT, bind_one


class ClusterKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The secrets of one cluster, made at its start and handed out by the launcher."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    transfer_key: bytes

    @classmethod
    def generate(cls) -> ClusterKeys:
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
            transfer_key=secrets.token_bytes(32),
        )


class _OnlyClusterClients:
    """ZAP credentials check: only the cluster's own client key may connect."""

    def __init__(self, keys: ClusterKeys) -> None:
        self._client_public = zmq.utils.z85.decode(keys.client_public)

    def callback(self, domain: str, key: bytes) -> bool:
        return zmq.utils.z85.decode(key) == self._client_public


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys) -> ThreadAuthenticator:
    """Start the ZAP authenticator, before any bind. The caller stops it before the context ends."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_OnlyClusterClients(keys))
    return authenticator


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys, host: str, ports: Sequence[int] = ANY_PORT
) -> tuple[zmq.Socket[bytes], str]:
    """Bind a ROUTER socket to one of `ports` of `host`; return it with its endpoint.

    Raises `ConfigError` if all ports are taken, OSError if `host` cannot be bound.
    """
    router = context.socket(zmq.ROUTER)
    _limit(router)
    router.curve_server = True
    router.curve_publickey = keys.server_public
    router.curve_secretkey = keys.server_secret
    router.router_handover = True

    def bind(port: int) -> int:
        try:
            router.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {error}") from error
        return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    try:
        port = bind_one(ports, bind)
    except BaseException:
        router.close(linger=0)
        raise
    return router, f"tcp://{host}:{port}"


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys, endpoint: str, identity: str
) -> zmq.Socket[bytes]:
    """Connect a DEALER socket to a ROUTER of the same cluster. The other side addresses it as `identity`."""
    dealer = context.socket(zmq.DEALER)
    _limit(dealer)
    dealer.identity = identity.encode()
    dealer.curve_serverkey = keys.server_public
    dealer.curve_publickey = keys.client_public
    dealer.curve_secretkey = keys.client_secret
    dealer.connect(endpoint)
    return dealer


def address_towards(host: str) -> str:
    """Return this host's address on the route to `host`, which can reach this host there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # UDP's connect sends nothing: it only looks the route up
        return str(probe.getsockname()[0])


def give_way() -> None:
    """Yield the core after an urgent send: ZeroMQ's I/O thread may need it before the next step."""
    os.sched_yield()


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.sndhwm = 100_000
    socket.rcvhwm = 100_000
    socket.sndtimeo = 5_000
    socket.heartbeat_ivl = 1_000
    socket.heartbeat_timeout = 5_000
