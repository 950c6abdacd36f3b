"""Handle failures that no actor has handled, in a notebook or script.

By default the cell stops. A cell is not stopped again if it already receives the failure because one of its calls
fails.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from meshbook.actors import replies
from meshbook.actors.runtime import faults, futures
from meshbook.actors.runtime.registry import ActorRegistry
from meshbook.actors.runtime.transport import local_transport, unblock_signals
from meshbook.ids import name_ranks

# Seconds for a failure to reach a caller as the result of a call, before it stops the cell.
_GRACE_S = 0.3
# Seconds that the report of how a process exited may take.
_EXIT_REASON_S = 1.0

# Failures that have not stopped the cell yet, by (mesh name, traceback): ranks with the same failure share an entry.
_pending_failures: dict[tuple[str, str], list[faults.MeshFailure]] = {}


def install(registry: ActorRegistry) -> None:
    """Register this module as the handler of unhandled failures."""
    if not registry.transport.exit_reasons.delay_s:
        registry.on_unhandled_failure = _unhandled
        registry.transport.exit_reasons.delay_s = _EXIT_REASON_S


def unhandled_fault_hook(failure: faults.MeshFailure) -> None:
    """Handle a failure that no `__supervise__` has handled. This default raises SystemExit, and the cell stops.

    Assign a replacement to `meshbook.actor.unhandled_fault_hook`; if it returns, the failure counts as handled.
    """
    raise SystemExit(1)


def _unhandled(failure: faults.MeshFailure, name: str) -> None:
    hook = getattr(sys.modules.get("meshbook.actor"), "unhandled_fault_hook", unhandled_fault_hook)
    if hook is not unhandled_fault_hook:
        threading.Thread(target=_run_hook, args=(hook, failure), name="unhandled_fault_hook", daemon=True).start()
        return
    received_at = time.monotonic()
    group = failure.mesh_name, failure.traceback
    failures = _pending_failures.setdefault(group, [])
    failures.append(failure)
    if len(failures) > 1:
        return  # of another rank; the first failure reports all of them

    def stop() -> None:
        ranks = [rank for other in _pending_failures.pop(group) for rank in other.ranks]
        if replies.reported_failures.get(failure.mesh_name, 0.0) < received_at - 2 * _GRACE_S - _EXIT_REASON_S:
            _stop_cell(failure, f"; alike on {name_ranks(ranks)}" if len(ranks) > len(failure.ranks) else "")

    local_transport().reactor.call_later(_GRACE_S, stop)


def _run_hook(hook: Any, failure: faults.MeshFailure) -> None:
    """Run the user's hook, on a separate thread."""
    unblock_signals()
    try:
        hook(failure)
    except BaseException:
        _stop_cell(failure)


def _stop_cell(failure: faults.MeshFailure, more: str = "") -> None:
    if not threading.main_thread().is_alive():
        return  # the program is exiting, and its processes with it
    main = threading.main_thread().ident or 0
    text = f"{failure}{more}; no __supervise__ has handled it"
    error = faults.SupervisionError(text, mesh_name=failure.mesh_name, traceback=failure.traceback)
    if futures.raise_in_waiter(main, error):
        return
    print(error, file=sys.stderr)
    if _is_running_code(sys._current_frames().get(main)):
        with contextlib.suppress(OSError):
            signal.pthread_kill(main, signal.SIGINT)


def _is_running_code(frame: FrameType | None) -> bool:
    """Whether the main thread runs a cell or a script, as opposed to an idle kernel."""
    if "IPython" not in sys.modules or getattr(sys.modules["IPython"], "get_ipython", lambda: None)() is None:
        return True
    while frame is not None:
        if frame.f_code.co_name == "run_code" and frame.f_code.co_filename.endswith("interactiveshell.py"):
            return True
        frame = frame.f_back
    return False
