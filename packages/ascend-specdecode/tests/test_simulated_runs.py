"""10,000 runs with random settings, faults and cancellations; broken engines are caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from ascend_specdecode import Cancelled, CancelReason, Failed, FailReason, Tokens
from ascend_specdecode.orchestrator.calls import DraftCall, TargetCall
from ascend_specdecode.orchestrator.engine import DraftVerify
from ascend_specdecode.orchestrator.lifetime import Lifetime
from ascend_specdecode.orchestrator.scheduler import Scheduler
from ascend_specdecode.orchestrator.step import Stepper
from ascend_specdecode.simulator import Backend, campaign, run

BACKENDS: Sequence[Backend] = ("asyncio", "trio")
RUNS, CHUNK = 5_000, 500  # seeds on each event loop, and how many one test takes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", range(0, RUNS, CHUNK))
def test_nothing_is_lost_doubled_leaked_or_hung(backend: Backend, first: int) -> None:
    found = campaign(range(first, first + CHUNK), backend)
    assert not found.failed, found.explain()
    # The runs do what their name says: all kinds of endings and plenty of faults occur.
    assert found.faults > CHUNK
    assert set(found.endings) == {
        "cancelled/consumer",
        "cancelled/engine_closed",
        "failed/request_time_limit",
        "failed/step_time_limit",
        "failed/target_error",
        "failed/verifier_error",
        "finished/length",
        "finished/stop",
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_seed_names_a_run(backend: Backend) -> None:
    for seed in range(40):
        first, again = (run(seed, backend, keep_log=True) for _ in range(2))
        # asyncio does not order tasks that are cancelled at the same moment.
        assert sorted(first.log) == sorted(again.log) != []
        assert attrs.evolve(first, log=()) == attrs.evolve(again, log=())


emit, end, leave = Lifetime.emit, Lifetime.end, DraftVerify.__aexit__


async def swallow_exceptions(self: DraftVerify[Any], *error: Any) -> bool:
    await leave(self, *error)
    return True


def double_the_bonus(self: Lifetime, tokens: Sequence[int], drafted: int) -> int:
    return emit(self, [*tokens, tokens[-1]], drafted)


def lose_the_last_token(self: Lifetime, tokens: Sequence[int], drafted: int) -> int:
    count = emit(self, tokens, drafted)
    event = next(one for one in reversed(self.events) if isinstance(one, Tokens))
    index = len(self.events) - 1 - list(reversed(self.events)).index(event)
    if len(event.tokens) > 1:
        short = Tokens(event.name, event.tokens[:-1], event.drafted, event.accepted)
        self.events[index] = short
    return count


def end_twice(self: Lifetime, ending: Any) -> bool:
    self.ending = None
    return end(self, ending)


def publish_twice(self: Lifetime, ending: Any) -> bool:
    done = end(self, ending)
    if done:
        self._publish(ending)
    return done


def fail_everybody(self: TargetCall[Any], lives: Sequence[Lifetime], error: Exception) -> None:
    for life in lives:
        life.end(Failed(life.name, FailReason.TARGET_ERROR, str(error), error))


def swallow_the_error(self: TargetCall[Any], lives: Any, error: Any) -> None:
    """Nobody is told."""


def forget_state(self: Any, life: Lifetime) -> None:
    """What the model holds stays."""


def only_count(self: TargetCall[Any], life: Lifetime, length: int) -> None:
    life.cached = length


def free_at_once(self: DraftVerify[Any], life: Lifetime) -> None:
    self._ended.append(life)
    self._target.free(life)
    self._wake()


def stay_asleep(self: DraftVerify[Any]) -> None:
    """The engine is not woken."""


def keep_running(self: Scheduler, life: Lifetime) -> None:
    """The place and the memory stay taken."""


def trust_every_guess(self: Stepper[Any], beside: Any) -> None:
    """Emit what was drafted ahead, without the target."""
    for row, proposal in zip(beside.rows, beside.proposals or (), strict=False):
        if proposal.tokens and row.life.ending is None:
            row.life.emit(proposal.tokens, 0)


def cancel_in_place_of_finishing(self: Lifetime, ending: Any) -> bool:
    return end(self, Cancelled(self.name, CancelReason.ENGINE_CLOSED))


BROKEN: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "bonus token doubled": (Lifetime, "emit", double_the_bonus, "the target's own are"),
    "last token lost": (Lifetime, "emit", lose_the_last_token, "the target's own are"),
    "two endings": (Lifetime, "end", end_twice, "requests were submitted and"),
    "ending told twice": (Lifetime, "end", publish_twice, "events follow the ending"),
    "wrong ending": (Lifetime, "end", cancel_in_place_of_finishing, "which it did not"),
    "error of others": (TargetCall, "_fail_named", fail_everybody, "not its own"),
    "error swallowed": (TargetCall, "_fail_named", swallow_the_error, "target:"),
    "target state kept": (TargetCall, "free", forget_state, "leak: the target holds"),
    "drafter state kept": (DraftCall, "forget", forget_state, "leak: the drafter knows"),
    "no rollback": (TargetCall, "roll_back", only_count, "target: holds"),
    "freed while scored": (DraftVerify, "_on_end", free_at_once, "free while a call was running"),
    "never woken": (DraftVerify, "_wake", stay_asleep, "hung"),
    "exception swallowed": (DraftVerify, "__aexit__", swallow_exceptions, "swallowed an exc"),
    "place kept": (Scheduler, "release", keep_running, "leak: the closed engine holds"),
    "unverified tokens": (Stepper, "_settle", trust_every_guess, "the target's own are"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_broken_engine_is_caught(
    monkeypatch: pytest.MonkeyPatch, backend: Backend, name: str
) -> None:
    owner, attribute, broken, expected = BROKEN[name]
    monkeypatch.setattr(owner, attribute, broken)
    found = campaign(range(60), backend)
    assert found.failed, f"{name}: not noticed in {found.runs} runs"
    assert expected in found.explain()
    assert f"--backend {backend} --replay" in found.explain()
