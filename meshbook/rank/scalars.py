"""Numbers that user code gives to `meshbook.log`: the rank keeps them until its next beat takes them along.

`log` is called in training loops, so it appends and does nothing else; naming, thinning and counting steps per second
are done by the service thread when it drains. Knows nothing of torch: a tensor is whatever has `item()`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from meshbook.clock import monotonic
from meshbook.errors import UsageError
from meshbook.wire.messages import Scalar

# Calls that are kept between two beats; the oldest are dropped. Ten times what a loop that computes anything makes.
_MAX_BUFFERED_CALLS = 16_384

# Calls of which one beat tells; of more, every n-th. A chart is some hundred points wide.
_MAX_REPORTED_CALLS = 512

# Scalars that one beat tells at most, whatever one call holds.
_MAX_REPORTED_SCALARS = 4_096

# Characters of a name that are kept.
_MAX_NAME_CHARS = 200

# Seconds over which steps per second are counted: long enough for steps of a second to give a steady number.
_RATE_WINDOW_S = 10.0

# Its number, its step, when it was made, and what was given.
LoggedCall = tuple[int, int, float, dict[str, Any]]


class ScalarLog:
    """What was logged on this rank and not told yet. `log` is called by user threads, the rest by one other thread.

    Attributes:
        num_steps: steps begun since the rank started: calls that did not name the step of the call before.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._calls: deque[LoggedCall] = deque(maxlen=_MAX_BUFFERED_CALLS)
        self._step = -1
        self._num_calls = 0
        self._last_drained = 0
        self.num_steps = 0
        self._step_samples: deque[tuple[float, int]] = deque()  # when it was drained, and how many steps there were

    def log(self, step: Any, scalars: dict[str, Any]) -> None:
        for name, value in scalars.items():
            if type(value) is not float:  # most are; and the dict is the caller's own, made by `**`
                scalars[name] = _to_float(name, value)
        if step is None:
            self._step = step = self._step + 1
            self.num_steps += 1
        elif step != self._step:
            self._step = step = _to_step(step)
            self.num_steps += 1
        self._num_calls += 1
        self._calls.append((self._num_calls, step, self._clock(), scalars))

    def drain(self) -> tuple[tuple[Scalar, ...], int]:
        """What was logged since the last time, in order, and how many numbers of it are not among them."""
        calls = []
        for _ in range(len(self._calls)):  # bounded: a loop may append as fast as this takes
            calls.append(self._calls.popleft())
        if not calls:
            return (), 0
        width = max(1, max(len(call[3]) for call in calls))
        num_dropped = max(0, calls[-1][0] - self._last_drained - len(calls)) * width  # pushed out by newer ones; about
        self._last_drained = calls[-1][0]
        every = math.ceil(len(calls) / min(_MAX_REPORTED_CALLS, max(1, _MAX_REPORTED_SCALARS // width)))
        if every > 1:
            thinned = _thin_out(calls, every)
            num_dropped += sum(len(call[3]) for call in calls) - sum(len(call[3]) for call in thinned)
            calls = thinned
        now = self._clock()
        reported = [
            Scalar(_sanitize_name(name), step, value, now - logged_at)
            for _, step, logged_at, scalars in calls
            for name, value in scalars.items()
        ]
        return tuple(reported[-2 * _MAX_REPORTED_SCALARS :]), num_dropped

    def steps_per_s(self) -> float | None:
        """Over the last ten seconds in which this was asked, about; None before the first step. Ask once per beat."""
        now, steps = self._clock(), self.num_steps
        samples = self._step_samples
        samples.append((now, steps))
        while len(samples) > 2 and now - samples[1][0] >= _RATE_WINDOW_S:
            samples.popleft()
        # What lies before the first step is not part of a rate: it is the time it took to get there.
        while len(samples) > 2 and samples[0][1] == 0 and samples[1][1] == 0:
            samples.popleft()
        since, steps_then = samples[0]
        return (steps - steps_then) / (now - since) if steps and now > since else None


def _thin_out(calls: list[LoggedCall], every: int) -> list[LoggedCall]:
    """Every n-th call and the last, and each at which a number stopped or began to be finite: the step of a first NaN
    is what people look for."""
    selected, was_finite = [], True
    for index, call in enumerate(calls):
        finite = all(map(math.isfinite, call[3].values()))
        if finite != was_finite or index % every == 0 or index == len(calls) - 1:
            selected.append(call)
        was_finite = finite
    return selected


def _to_float(name: str, value: Any) -> float:
    """One number as a float: Python's, NumPy's, a tensor with one element (of one on a GPU it waits for the value)."""
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
        return float(value if item is None else item())  # not float(tensor): that warns where it requires a gradient
    except (TypeError, ValueError, RuntimeError):
        what = f"has shape {tuple(shape)}" if isinstance(shape, tuple) and shape else f"is a {kind.__name__}"
        hint = f"; give one number of it, such as {name}.mean()" if isinstance(shape, tuple) and shape else ""
        raise UsageError(f"meshbook.log takes one number for each name, and {name} {what}{hint}") from None


def _to_step(step: Any) -> int:
    try:
        return int(step)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(f"meshbook.log takes a whole number for step, and was given {step!r:.60}") from None


def _sanitize_name(name: str) -> str:
    return name if name.isascii() and len(name) <= _MAX_NAME_CHARS else _truncate_name(name)


def _truncate_name(name: str) -> str:
    return name[:_MAX_NAME_CHARS].encode("utf-8", "replace").decode()


# A process is one rank for as long as it lives, and `meshbook.log` is a function of the process.
_installed_log: ScalarLog | None = None


def install(scalars: ScalarLog | None) -> None:
    """From now on `meshbook.log` in this process is heard by `scalars`."""
    global _installed_log
    _installed_log = scalars


def log(*, step: int | None = None, **scalars: Any) -> None:
    """Note numbers of a training loop on this rank, for the dashboard's charts and `mesh.metrics()`.

        for batch in data:
            loss = train(batch)
            meshbook.log(loss=loss, lr=schedule.get_last_lr()[0])

    Costs about a microsecond and never waits, but for the value of a CUDA tensor, as `.item()` does. What is logged is
    told with the rank's next beat, once per second; of more than 512 calls in a second every n-th is.

    Args:
        step: None counts on from the last one, from 0. Several calls may share one step.
        scalars: a number each: int, float, NumPy's, a tensor with one element. NaN and inf are kept as they are.

    Raises:
        UsageError: something is not one number; or this process is not a rank of a mesh.
    """
    if _installed_log is None:
        raise UsageError(
            "meshbook.log notes numbers on a rank, and this code runs on the controller; call it in a cell that runs "
            "on the mesh (mesh.run(...), or a cell of the Meshbook kernel without %%controller)"
        )
    _installed_log.log(step, scalars)
