"""What a worker's actor does before it starts the worker."""

from __future__ import annotations

import msgspec

from deploy.actors import WorkerActor
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.roles import ROLES
from protocol.version import version
from worker.launch import Launch


def test_a_node_with_another_tandem_starts_no_worker() -> None:
    launch = msgspec.to_builtins(
        Launch(
            role=ROLES["decode"],
            worker_id="decode-0",
            router_endpoints=["tcp://127.0.0.1:1"],
            config=ServeConfig(),
            keys=ClusterKeys.generate(),
            release="9.8",
        )
    )
    actor = WorkerActor("unused", {}, False)
    for told in (launch, launch | {"role": "of another kind"}):
        end = actor.run(msgspec.msgpack.encode(told))
        assert not end.was_killed
        assert f"has Tandem {version()}, the server Tandem 9.8" in end.reason
