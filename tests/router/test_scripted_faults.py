"""Twelve faults at four points of a request's life: the answer is the same, and nothing is left behind."""

from __future__ import annotations

import pytest

from protocol.outputs import TokenOutput
from tests.router.fake_worker import echo_script
from tests.router.router_clients import emitted, eventually, failure, is_idle, lose, post, said

NUM_TOKENS = 40
POINTS = ("as its prompt is computed", "as it is handed over", "as it decodes", "before its last token")


class Scene:
    """A request that is paused at a point, its workers, and one more worker of each role."""

    def __init__(self, router, pool, point: str) -> None:
        self.router, self._pool, self.point = router, pool, point
        decodes = {f"decode-{number}": router.add_worker(f"decode-{number}") for number in range(2)}
        for number in range(2):
            router.add_worker(f"prefill-{number}", "prefill", peers=decodes)
        if point == "as its prompt is computed":
            self._each("hold")
            sent = 0
        elif point == "as it is handed over":
            self._each("keep")
            sent = 1
        else:
            sent = 7 if point == "as it decodes" else NUM_TOKENS - 1
            for worker in decodes.values():
                worker.stall_after = sent
        self.answer = pool.submit(post, router, max_tokens=NUM_TOKENS, return_token_ids=True)
        eventually(lambda: emitted(router) == [sent] and any(worker.generated for worker in router.workers))
        (request,) = router.server.state.journal
        by_id = {worker.worker_id: worker for worker in router.workers}
        self.prefill, self.decode = (by_id[request.worker_ids[task]] for task in ("prefill", "decode"))
        self.request_id = request.request_id
        self.expected = echo_script(self.prefill.generated[0])[:NUM_TOKENS]
        self.operations = []

    def _each(self, brake: str) -> None:
        for worker in self.router.workers:
            if worker.role == "prefill" or brake == "hold":
                getattr(worker, brake).set()

    def release(self) -> None:
        for worker in self.router.workers:
            worker.hold.clear()
            worker.stall_after = 2**31
            if worker.keep.is_set():
                worker.keep.clear()
                self._hand_over_what_is_held(worker)

    def _hand_over_what_is_held(self, worker) -> None:
        for request_id in list(worker.held):
            job = worker.held.pop(request_id, None)
            if job is not None:
                worker._hand_over(job)

    @property
    def holder(self):
        """Return the worker that is to send the next token."""
        return self.prefill if self.point in POINTS[:2] else self.decode

    def operate(self, worker, action: str, **body) -> None:
        url = f"/workers/{worker.worker_id}/{action}"
        self.operations.append(self._pool.submit(self.router.http.post, url, json=body))
        eventually(lambda: any(w.draining for w in self.router.server.state.registry) or self._left(worker))

    def _left(self, worker) -> bool:
        return worker.worker_id not in [w.key.worker_id for w in self.router.server.state.registry]

    def say(self, worker, incarnation: str, output: TokenOutput) -> None:
        worker.post(said(worker, output, incarnation=incarnation))


def prefill_dies(scene: Scene) -> None:
    lose(scene.router, scene.prefill)


def decode_dies(scene: Scene) -> None:
    lose(scene.router, scene.decode)


def both_die(scene: Scene) -> None:
    lose(scene.router, scene.prefill)
    lose(scene.router, scene.decode)


def holder_freezes_and_thaws(scene: Scene) -> None:
    """The worker counts as dead, then continues with requests that others have taken over."""
    scene.holder.mute.set()
    registry = scene.router.server.state.registry
    eventually(lambda: not registry.named(scene.holder.worker_id).live)
    scene.holder.mute.clear()
    eventually(lambda: registry.named(scene.holder.worker_id).live)


def prefill_is_drained(scene: Scene) -> None:
    scene.operate(scene.prefill, "drain")


def decode_is_drained(scene: Scene) -> None:
    scene.operate(scene.decode, "drain")


def decode_changes_its_role(scene: Scene) -> None:
    scene.operate(scene.decode, "role", role="prefill")


def hand_off_is_refused(scene: Scene) -> None:
    """At other points than the hand-off, the refusal is late news of an earlier one."""
    failed = scene.prefill.handover_failed(scene.request_id, scene.decode.incarnation, "overloaded", False)
    if scene.point == "as it is handed over":
        scene.prefill.post(failed)
        eventually(lambda: scene.prefill.redirects)
    elif scene.point == "as its prompt is computed":
        scene.prefill.post(scene.prefill.handover_failed("of-another", "0" * 16, "overloaded", False))
    else:
        scene.decode.post(scene.decode.handover_failed(scene.request_id, "0" * 16, "overloaded", False))


def late_messages_come(scene: Scene) -> None:
    """Send messages of another incarnation, a stranger to the request, an earlier placement, and one in
    another worker's name.
    """
    token = TokenOutput(request_id=scene.request_id, token_ids=[5], finish_reason="stop")
    (idle,) = [w for w in scene.router.workers if w.role == "decode" and w is not scene.decode]
    scene.say(scene.holder, "0" * 16, token)
    scene.say(idle, idle.incarnation, token)
    earlier = TokenOutput(request_id="earlier", token_ids=[5], finish_reason="stop")
    scene.say(scene.holder, scene.holder.incarnation, earlier)
    idle.post(said(scene.holder, token))
    for reason in ("stale_incarnation", "unknown_request", "not_the_holder", "malformed"):
        eventually(lambda why=reason: scene.router.metric("tandem_messages_dropped_total", reason=why) == 1)


def holder_gives_it_up(scene: Scene) -> None:
    holder_forgets_it(scene)
    scene.say(scene.holder, scene.holder.incarnation, failure(scene.request_id, "worker_lost"))


def holder_forgets_it(scene: Scene) -> None:
    """The request's arrival or the news of its end was lost."""
    scene.holder.jobs.pop(scene.request_id, None)
    scene.holder.held.pop(scene.request_id, None)


def next_output_gets_lost(scene: Scene) -> None:
    """Lose the next output, together with all others of the same step."""
    worker = scene.decode if scene.point == "as it is handed over" else scene.holder
    usual, is_lost = worker._step, iter([True])

    def step():
        outputs = usual()
        return [] if outputs and next(is_lost, False) else outputs

    worker._step = step


FAULTS = [
    prefill_dies,
    decode_dies,
    both_die,
    holder_freezes_and_thaws,
    prefill_is_drained,
    decode_is_drained,
    decode_changes_its_role,
    hand_off_is_refused,
    late_messages_come,
    holder_gives_it_up,
    holder_forgets_it,
    next_output_gets_lost,
]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_answer_survives_the_fault(make_router, pool, fault, point, monkeypatch):
    monkeypatch.setattr("router.dispatch.races.ASK_AFTER_S", 0.2)
    # A slow worker must not count as frozen in other cases.
    timeout_s = 1.0 if fault is holder_freezes_and_thaws else 10.0
    scene = Scene(make_router(worker_timeout=timeout_s), pool, point)
    fault(scene)
    scene.release()
    response = scene.answer.result(20)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["token_ids"] == scene.expected
    assert all(operation.result(20).status_code == 200 for operation in scene.operations)
    eventually(lambda: is_idle(scene.router))
    assert scene.router.metric("tandem_generation_tokens_total") == NUM_TOKENS
