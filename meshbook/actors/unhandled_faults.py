"""Handle failures that no actor has handled, in a notebook or script.

By default the cell stops. A cell is not stopped again if it already receives the failure because one of its calls
fails.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from meshbook.actors import replies
from meshbook.actors.mesh_references import MeshReferences
from meshbook.actors.runtime import faults, futures
from meshbook.actors.runtime.registry import local_registry
from meshbook.actors.runtime.transport import local_transport, unblock_signals
from meshbook.ids import name_ranks
from meshbook.wire.messages import ActorFailure

# Seconds for a failure to reach a caller as the result of a call, before it stops the cell.
_GRACE_S = 0.3
# Seconds before a failure within which a caller must have received one of the same mesh, so that it is the same one.
_SAME_FAILURE_S = 1.6

# Failures that have not stopped the cell yet, by (mesh name, traceback): ranks with the same failure share an entry.
_pending_failures: dict[tuple[str, str], list[faults.MeshFailure]] = {}


def unhandled_fault_hook(failure: faults.MeshFailure) -> None:
    """Handle a failure that no `__supervise__` has handled. This default raises SystemExit, and the cell stops.

    Assign a replacement to `meshbook.actor.unhandled_fault_hook`; if it returns, the failure counts as handled.
    """
    raise SystemExit(1)


def report(failure: faults.MeshFailure) -> None:
    """Handle a failure that no actor has handled: `ActorRegistry.on_unhandled_failure` of a client."""
    hook = getattr(sys.modules.get("meshbook.actor"), "unhandled_fault_hook", unhandled_fault_hook)
    if hook is not unhandled_fault_hook:
        threading.Thread(target=_run_hook, args=(hook, failure), name="unhandled_fault_hook", daemon=True).start()
        return
    group = failure.mesh_name, failure.traceback
    failures = _pending_failures.setdefault(group, [])
    failures.append(failure)
    if len(failures) > 1:
        return  # of another rank; the first failure reports all of them

    def stop() -> None:
        if group not in _pending_failures:
            return  # reported after a heal
        text = _describe(failure, _pending_failures.pop(group))
        if replies.reported_failures.get(failure.mesh_name, 0.0) < failure.occurred_at - _SAME_FAILURE_S:
            _stop_cell(failure, text)

    local_transport().reactor.call_later(_GRACE_S, stop)


def ranks_replaced() -> None:
    """Handle the end of a heal: failures that came before it are reported, and do not stop what follows it."""
    while _pending_failures:
        _, failures = _pending_failures.popitem()
        print(_describe(failures[0], failures), file=sys.stderr)


def _run_hook(hook: Any, failure: faults.MeshFailure) -> None:
    """Run the user's hook, on a separate thread."""
    unblock_signals()
    try:
        hook(failure)
    except BaseException:
        _stop_cell(failure, _describe(failure, [failure]))


def _describe(failure: faults.MeshFailure, alike: Sequence[faults.MeshFailure]) -> str:
    ranks = [rank for other in alike for rank in other.ranks]
    more = f"; alike on {name_ranks(ranks)}" if len(ranks) > len(failure.ranks) else ""
    return f"{failure}{more}; no __supervise__ has handled it{_missing_module_hint(failure, ranks)}"


def _missing_module_hint(failure: faults.MeshFailure, ranks: Sequence[int]) -> str:
    """Return a sentence with what to do about a module that the ranks' machines lack; "" if it is not that."""
    failures = dict.fromkeys(ranks, ActorFailure(0, "fault", "", str(failure)))
    for owned in list(local_registry().owned.values()):
        references = owned.ref.references
        if owned.ref.name == failure.mesh_name and isinstance(references, MeshReferences):
            hint = references.missing_module_hint(failures)
            return hint and f". {hint}"
    return ""


def _stop_cell(failure: faults.MeshFailure, text: str) -> None:
    if not threading.main_thread().is_alive():
        return  # the program is exiting, and its processes with it
    main = threading.main_thread().ident or 0
    error = faults.SupervisionError(text, mesh_name=failure.mesh_name, traceback=failure.traceback)
    if futures.raise_in_waiter(main, error):
        return
    print(error, file=sys.stderr)
    if _is_running_code(sys._current_frames().get(main)):
        with contextlib.suppress(OSError):
            signal.pthread_kill(main, signal.SIGINT)


def _is_running_code(frame: FrameType | None) -> bool:
    """Whether the main thread runs a cell or a script that is to stop, as opposed to an idle kernel, or to a heal."""
    if _is_healing(frame):
        return False
    if "IPython" not in sys.modules or getattr(sys.modules["IPython"], "get_ipython", lambda: None)() is None:
        return True
    while frame is not None:
        if frame.f_code.co_name == "run_code" and frame.f_code.co_filename.endswith("interactiveshell.py"):
            return True
        frame = frame.f_back
    return False


def _is_healing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") != "meshbook.controller.healing":
        frame = frame.f_back
    return frame is not None
