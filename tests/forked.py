"""What the fork server imports, so that the workers and peers that tests start are there at once."""

from __future__ import annotations

import gc
import importlib

from kvtransfer.transports.ucx.bindings import preload
from protocol.roles import ROLES

_IMPORTED = (
    "bench.transfer.sides",
    "speculation.eagle.drafter",
    "speculation.medusa.drafter",
    "tests.faults.sides",
    "tests.kvtransfer.transfer_sides",
    "tests.worker.child",
    "transformers.models.llama.modeling_llama",
)

for module in (*_IMPORTED, *(role.loop.partition(":")[0] for role in ROLES.values())):
    importlib.import_module(module)
preload()
gc.collect()
gc.freeze()  # or each forked process would copy all of it as soon as it collects its own garbage
