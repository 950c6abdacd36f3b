"""Numbers that user code passes to `meshbook.log`: the rank stores them until its next heartbeat sends them.

`log` is called in training loops, so it only appends. The service thread sanitizes names, thins out calls and counts
steps per second when it drains. Does not depend on torch: a tensor is anything with `item()`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from meshbook.clock import monotonic
from meshbook.errors import UsageError, escape_surrogates
from meshbook.wire.messages import Scalar

# Calls stored between two heartbeats; the oldest are dropped. Ten times what a loop with any computation makes.
_MAX_BUFFERED_CALLS = 16_384

# Calls reported per heartbeat; of more, every n-th. A chart is a few hundred points wide.
_MAX_REPORTED_CALLS = 512

# Limit of scalars per heartbeat, however many one call has.
_MAX_REPORTED_SCALARS = 4_096

# Limit of a name in characters.
_MAX_NAME_CHARS = 200

# Window in seconds for steps per second: long enough for a steady rate with steps of a second.
_RATE_WINDOW_S = 10.0

# Its number, its step, its time, and its scalars.
LoggedCall = tuple[int, int, float, dict[str, Any]]


class ScalarLog:
    """What was logged on this rank and not reported yet. User threads call `log`; one other thread calls the rest.

    Attributes:
        num_steps: steps begun since the rank started: calls with another step than the previous call.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._calls: deque[LoggedCall] = deque(maxlen=_MAX_BUFFERED_CALLS)
        self._step = -1
        self._num_calls = 0
        self._last_drained = 0
        self.num_steps = 0
        self._step_samples: deque[tuple[float, int]] = deque()  # time of each sample, and `num_steps` then

    def log(self, step: Any, scalars: dict[str, Any]) -> None:
        for name, value in scalars.items():
            if type(value) is not float:  # most are; the dict belongs to this call, made by `**`
                scalars[name] = _to_float(name, value)
        if step is None:
            self._step = step = self._step + 1
            self.num_steps += 1
        elif step != self._step:
            self._step = step = _to_step(step)
            self.num_steps += 1
        self._num_calls += 1
        self._calls.append((self._num_calls, step, self._clock(), scalars))

    @property
    def step(self) -> int:
        """The step of the last call; -1 before the first."""
        return int(self._step)

    def drain(self) -> tuple[tuple[Scalar, ...], int]:
        """Return what was logged since the last drain, in order, and how many of its numbers are left out."""
        calls = []
        for _ in range(len(self._calls)):  # bounded: a loop may append as fast as this pops
            calls.append(self._calls.popleft())
        if not calls:
            return (), 0
        width = max(1, max(len(call[3]) for call in calls))
        # pushed out by newer ones; approximate
        num_dropped = max(0, calls[-1][0] - self._last_drained - len(calls)) * width
        self._last_drained = calls[-1][0]
        every = math.ceil(len(calls) / min(_MAX_REPORTED_CALLS, max(1, _MAX_REPORTED_SCALARS // width)))
        if every > 1:
            thinned = _thin_out(calls, every)
            num_dropped += sum(len(call[3]) for call in calls) - sum(len(call[3]) for call in thinned)
            calls = thinned
        now = self._clock()
        reported = [
            Scalar(escape_surrogates(name[:_MAX_NAME_CHARS])[:_MAX_NAME_CHARS], step, value, now - logged_at)
            for _, step, logged_at, scalars in calls
            for name, value in scalars.items()
        ]
        return tuple(reported[-2 * _MAX_REPORTED_SCALARS :]), num_dropped

    def steps_per_s(self) -> float | None:
        """Return the rate over about the last ten seconds; None before the first step. Call once per heartbeat."""
        now, steps = self._clock(), self.num_steps
        samples = self._step_samples
        samples.append((now, steps))
        while len(samples) > 2 and now - samples[1][0] >= _RATE_WINDOW_S:
            samples.popleft()
        # The time before the first step is not part of the rate.
        while len(samples) > 2 and samples[0][1] == 0 and samples[1][1] == 0:
            samples.popleft()
        since, steps_then = samples[0]
        return (steps - steps_then) / (now - since) if steps and now > since else None


def _thin_out(calls: list[LoggedCall], every: int) -> list[LoggedCall]:
    """Select every n-th call, the last, and each at which the numbers stop or start being finite.

    The step of a first NaN is what users look for.
    """
    selected, was_finite = [], True
    for index, call in enumerate(calls):
        finite = all(map(math.isfinite, call[3].values()))
        if finite != was_finite or index % every == 0 or index == len(calls) - 1:
            selected.append(call)
        was_finite = finite
    return selected


def _to_float(name: str, value: Any) -> float:
    """Return one number as a float: Python's, NumPy's, a tensor with one element (waits for it on a GPU)."""
    kind = type(value)
    if kind is int or kind is bool:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    shape = getattr(value, "shape", ())
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        item = getattr(value, "item", None)
        return float(value if item is None else item())  # not float(tensor): that warns if it requires a gradient
    except (TypeError, ValueError, RuntimeError):
        what = f"has shape {tuple(shape)}" if isinstance(shape, tuple) and shape else f"is a {kind.__name__}"
        hint = f"; give one number of it, such as {name}.mean()" if isinstance(shape, tuple) and shape else ""
        raise UsageError(f"meshbook.log takes one number for each name, and {name} {what}{hint}") from None


def _to_step(step: Any) -> int:
    try:
        return int(step)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(f"meshbook.log takes a whole number for step, and was given {step!r:.60}") from None


# Global, because a process is one rank for its lifetime, and `meshbook.log` is a function of the process.
_installed_log: ScalarLog | None = None


def install(scalars: ScalarLog | None) -> None:
    """Set the log that receives `meshbook.log` in this process."""
    global _installed_log
    _installed_log = scalars


def installed() -> ScalarLog | None:
    """Return the log of this process; None: it is no rank."""
    return _installed_log


def log(*, step: int | None = None, **scalars: Any) -> None:
    """Log numbers of a training loop on this rank, for the dashboard's charts and `mesh.metrics()`.

        for batch in data:
            loss = train(batch)
            meshbook.log(loss=loss, lr=schedule.get_last_lr()[0])

    Costs about a microsecond and never waits, except for the value of a CUDA tensor, as `.item()` does. The numbers are
    sent with the rank's next heartbeat, once per second; of more than 512 calls in a second only every n-th is sent.

    Args:
        step: None continues from the last step, starting at 0. Several calls may share one step.
        scalars: one number each: int, float, a NumPy number, a tensor with one element. NaN and inf are preserved.

    Raises:
        UsageError: a value is not one number; or this process is not a rank of a mesh.
    """
    if _installed_log is None:
        raise UsageError(
            "meshbook.log notes numbers on a rank, and this code runs on the controller; call it in a cell that runs "
            "on the mesh (mesh.run(...), or a cell of the Meshbook kernel without %%controller)"
        )
    _installed_log.log(step, scalars)
