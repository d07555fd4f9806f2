"""KV between the pools of two processes on one GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from kvtransfer.interface import Completed, TransferError
from kvtransfer.transports.registry import TransportOptions
from kvtransfer.transports.ucx_agent import bindings
from tests.gpu.receiving_process import DEVICE, NUM_BLOCKS, SPUN, WAIT_S, make_pool, receive
from tests.kvtransfer.transfer_sides import ReceiverEnd, SenderEnd

WIRES = ["tcp", "ucx", "cuda_ipc"]


def answer(pipe: Connection) -> Any:
    assert pipe.poll(WAIT_S), "the other process does not answer"
    return pipe.recv()


@pytest.fixture(params=WIRES)
def peer(request: pytest.FixtureRequest) -> Iterator[tuple[str, Connection]]:
    if request.param == "ucx":
        try:
            bindings()
        except TransferError as error:
            pytest.skip(str(error))
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=receive, args=(theirs, request.param), daemon=True)
    process.start()
    theirs.close()
    yield request.param, ours
    ours.send(None)
    process.join(WAIT_S)
    assert process.exitcode == 0


def test_a_steps_kv_arrives_without_waiting_for_the_next_step(peer: tuple[str, Connection]) -> None:
    wire, pipe = peer
    pool, values = make_pool()
    sender = SenderEnd([wire], pool)
    address = answer(pipe)
    for number in range(3):
        blocks = list(range(number, NUM_BLOCKS, 3))
        pipe.send((f"lease-{number}", blocks))
        assert answer(pipe) == "open"
        index = torch.tensor(blocks, device=DEVICE)  # indexing by a list would wait for the GPU
        computed = torch.arange(len(blocks), device=DEVICE, dtype=torch.bfloat16).unsqueeze(1) + number
        torch.cuda._sleep(SPUN)
        values[index] = computed
        sender.push(address, f"lease-{number}", blocks)
        next_step = torch.cuda.Event()
        for _ in range(20):
            torch.cuda._sleep(SPUN)
        next_step.record()
        assert isinstance(sender.wait_lease(f"lease-{number}", WAIT_S), Completed)
        if number:  # the first lease waits for the connection
            assert not next_step.query()
        read, came = answer(pipe)
        assert (read == 3.0).all()
        assert [row[0] for row in came] == [index + number for index in range(len(blocks))]
        assert (came == came[:, :1]).all()
    sender.close()


@pytest.mark.parametrize("wire_dtype", ["int8", "fp8"])
def test_values_are_quantized_on_the_wire(wire_dtype: str) -> None:
    (source_pool, source), (target_pool, target) = make_pool(), make_pool()
    source.copy_(torch.randn(source.shape, device=DEVICE))
    sender = SenderEnd(["tcp"], source_pool, TransportOptions(wire_dtype=wire_dtype))
    receiver = ReceiverEnd(["tcp"], target_pool)
    receiver.open("lease", list(range(NUM_BLOCKS)))
    sender.push(receiver.peer, "lease", list(range(NUM_BLOCKS)))
    assert isinstance(sender.wait_lease("lease", WAIT_S), Completed)
    receiver.wait_lease("lease", WAIT_S)
    error = (target.float() - source.float()).norm() / source.float().norm()
    assert 0 < float(error) < 0.05
    sender.close()
    receiver.close()
