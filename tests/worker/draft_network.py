"""Decode loops and draft loops over real engines, with a network that the test controls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from decode_worker.loop import DecodeLoop
from draft_worker.loop import DraftLoop
from engine.engine import Engine
from protocol.codec import encode, peer_reply, peer_request
from protocol.ids import PeerAddress
from protocol.requests import DraftPlan, EngineRequest
from protocol.router_to_worker import PeerGone, Replan
from protocol.speculation import SpeculativeConfig
from speculation.remote import MultiStepSpeculator, RemoteDrafter
from speculation.speculator import BatchSpeculator
from tests.speculation.small_engine import run, small_config, tokens
from tests.worker.light_loop import LightLoop, address

DRAFTER = address("draft-0", "d" * 16)


def remote_plan(at: PeerAddress = DRAFTER, max_tokens: int = 8) -> DraftPlan:
    return DraftPlan(method="draft_model", max_tokens=max_tokens, at=at)


def target_engine(
    model: Path, remote: RemoteDrafter | None, draft: Path, num_blocks: int = 256, **options: Any
) -> Engine:
    speculative = SpeculativeConfig(method="draft_model", model=str(draft), **options)
    config = small_config(model, 2 * num_blocks, speculative_config=speculative)
    return Engine(config, speculate=partial(BatchSpeculator, remote=remote))


def plain_tokens(model: Path, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """Return the tokens without drafts."""
    return tokens(run(Engine(small_config(model, 256)), requests))


class DecodeSide:
    """A decode worker with remote drafts."""

    def __init__(self, name: str, model: Path, draft: Path, **options: Any) -> None:
        self.remote = RemoteDrafter(first_granted=4)
        self.engine = target_engine(model, self.remote, draft, **options)
        self.incarnation = name * 16
        self.identity = f"{name}:{self.incarnation}".encode()
        self.restart()

    def restart(self) -> None:
        """Restart with a new loop and new counters around the same engine."""
        for request_id in list(self.engine.sequences):
            self.engine.abort(request_id)
        self.remote.requests.clear()
        self.remote.ended.clear()
        self._before = self.engine.counters()
        self._steps_before = self.engine.stats().steps
        self.light = LightLoop(DecodeLoop, self.engine, "decode", self.remote, self.incarnation)
        self.loop: DecodeLoop = self.light.loop

    def generate(self, request: EngineRequest, plan: DraftPlan | None) -> None:
        planned = msgspec.structs.replace(request, draft_plan=plan)
        self.light.generate(planned, incarnation=self.incarnation)

    def replan(self, request_id: str, plan: DraftPlan | None) -> None:
        message = Replan(incarnation=self.incarnation, request_id=request_id, plan=plan)
        self.light.loop.take(message, self.light.router)

    def step(self) -> None:
        self.light.step()

    def tokens(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for output in self.light.router.outputs:
            assert output.finish_reason != "error", output.error
            found.setdefault(output.request_id, []).extend(output.token_ids)
        return found

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.light.router.outputs)

    @property
    def num_steps(self) -> int:
        return self.engine.stats().steps - self._steps_before

    def counter(self, name: str) -> float:
        return self.loop.counters[name]

    def drafted(self, source: str) -> float:
        """Return the number of verified tokens from a source."""
        return self._speculated("spec_decode_num_draft_tokens_total", source)

    def accepted(self, source: str) -> float:
        return self._speculated("spec_decode_num_accepted_tokens_total", source)

    def _speculated(self, name: str, source: str) -> float:
        key = f'{name}{{method="{source}"}}'
        return self.engine.counters().get(key, 0.0) - self._before.get(key, 0.0)


class DraftSide:
    """A draft worker at the address `at`."""

    def __init__(self, draft: Path, at: PeerAddress = DRAFTER, **options: Any) -> None:
        self.at = at
        self.engine = Engine(
            small_config(draft, **({"num_blocks": 256} | options)), speculate=MultiStepSpeculator
        )
        self.restart()

    def restart(self) -> None:
        for request_id in list(self.engine.sequences):
            self.engine.abort(request_id)
        self.light = LightLoop(DraftLoop, self.engine, "draft", incarnation=self.at.incarnation)
        self.loop: DraftLoop = self.light.loop

    def counter(self, name: str) -> float:
        return self.loop.counters[name]

    def tell_gone(self, peer: PeerAddress) -> None:
        """Report a lost worker, as the router does."""
        message = PeerGone(incarnation=self.at.incarnation, worker_id=peer.worker_id, gone=peer.incarnation)
        router: Any = self.light.router
        self.loop.take(message, router)

    def step(self) -> None:
        if self.engine.has_work():
            self.loop._step()


class Network:
    """Carries encoded messages in order."""

    def __init__(self, decodes: Sequence[DecodeSide], drafts: Sequence[DraftSide]) -> None:
        self.decodes, self.drafts = decodes, list(drafts)
        self.frozen: set[str] = set()

    def _running(self) -> list[DraftSide]:
        return [draft for draft in self.drafts if draft.at.incarnation not in self.frozen]

    def carry(self) -> None:
        """Deliver all that was sent. Frozen workers get nothing."""
        for draft in self.drafts:
            for identity, reply in draft.light.inbox.replies:
                decode = next(each for each in self.decodes if each.identity == identity)
                decode.loop.on_peer_reply(draft.at, peer_reply.decode(encode(reply)))
            draft.light.inbox.replies.clear()
        running = {draft.at.incarnation: draft for draft in self._running()}
        for decode in self.decodes:
            for peer, message in decode.light.peers.sent:
                if (draft := running.get(peer.incarnation)) is not None:
                    draft.loop.on_peer_request(decode.identity, peer_request.decode(encode(message)))
            decode.light.peers.sent.clear()
        for draft in self._running():
            draft.loop.handle({})

    def turn(self, drafts_per_step: int = 2) -> None:
        """Run a step of each decode worker and, meanwhile, a few of each draft worker."""
        for decode in self.decodes:
            decode.step()
        for _ in range(drafts_per_step):
            self.carry()
            for draft in self._running():
                draft.step()
        self.carry()

    def run(self) -> None:
        """Run until all requests have their tokens."""
        for _ in range(2000):
            if not any(decode.engine.has_work() for decode in self.decodes):
                return
            self.turn()
        raise AssertionError("it does not end")

    def settle(self, turns: int = 20) -> None:
        """Run until nothing happens any more. Each turn takes a second."""
        for now in range(turns):
            for decode in self.decodes:
                decode.loop.expire(time.monotonic() + now)
            self.turn()
