"""Moves KV blocks between the pools of two workers over any of several transports."""

from kvtransfer.blocks.memory import PoolMemory
from kvtransfer.interface import (
    Closed,
    Completed,
    Failed,
    Progress,
    ReceiveEvent,
    RegisteredPool,
    SendEvent,
    Sent,
    TransferError,
)
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender

__all__ = [
    "Closed",
    "Completed",
    "Failed",
    "PoolMemory",
    "Progress",
    "ReceiveEvent",
    "Receiver",
    "RegisteredPool",
    "SendEvent",
    "Sender",
    "Sent",
    "TransferError",
]
