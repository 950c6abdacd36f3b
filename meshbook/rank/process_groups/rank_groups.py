"""The process groups of a rank among its calls: formed, held, resumed and aborted as calls and the host require.

`call_state` decides; this module carries its effects out on `groups`. torch is imported only when groups are formed.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from meshbook.errors import CollectiveAborted, RankLost
from meshbook.ids import CallId, Ranks
from meshbook.rank import probes
from meshbook.rank.call_state import CallEffect, CallState
from meshbook.rank.device import choose_backend
from meshbook.rank.process_groups import departures, device_stop, positions
from meshbook.rank.process_groups.exit_questions import ExitQuestions
from meshbook.rank.process_groups.prompt_clock import PromptClock
from meshbook.rank.process_groups.ring import Collective, CollectiveRing
from meshbook.wire import spawn
from meshbook.wire.crash_log import CrashLog
from meshbook.wire.messages import FormGroups, Outcome, RankError, RankPosition, RanksLeft, ResumeCollectives

if TYPE_CHECKING:  # they import torch, which a mesh may not have
    from meshbook.rank.process_groups.groups import ProcessGroups
    from meshbook.rank.process_groups.store import MeshStore

# Seconds that ranks wait for each other while process groups are formed.
_FORM_TIMEOUT_S = 60.0

# Seconds between checks whether a collective waits for a rank that has left the call.
_LEFT_POLL_S = 0.1


class RankGroups:
    """Forms the rank's process groups, and applies the ends of calls, Stops and departures to them.

    Attributes:
        ring: the collectives of this rank.
        world_size: the number of ranks of the mesh.
        exits: the questions whether a rank has ended.
        clock: of timeouts; stands still while a prompt of the mesh is open.
    """

    def __init__(
        self,
        config: spawn.RankConfig,
        device: str,
        state: CallState,
        context: zmq.Context[zmq.Socket[bytes]],
        crash_log: CrashLog,
        exits: ExitQuestions,
        *,
        running_file: Callable[[], str | None],
        describe_error: Callable[[BaseException], RankError],
    ) -> None:
        """
        Args:
            context: for the connection to the mesh's store.
            running_file: returns the file name of the running cell.
        """
        self.ring = CollectiveRing(detailed=probes.are_probes_enabled())
        self.world_size, self.exits, self.clock = config.world_size, exits, PromptClock()
        self._config, self._device, self._state = config, device, state
        self._context, self._crash_log = context, crash_log
        self._running_file, self._describe_error = running_file, describe_error
        self._groups: ProcessGroups | None = None
        self._abort_lock = threading.Lock()  # held while `_groups` is set
        self._stopping_call: CallId | None = None  # stopped last, while there were collectives on a device
        self._early_abort: tuple[str, int | None] | None = None  # reason and generation, from before there were groups
        self._store: MeshStore | None = None  # for all generations of the groups

    @property
    def process_groups(self) -> ProcessGroups | None:
        """The process groups; None before the first `form`."""
        return self._groups

    # ---- the main thread

    def form(self, command: FormGroups) -> tuple[dict[str, Any], str | None]:
        """Form the process groups of this generation. Return the names that user code finds, and the backend."""
        config = self._config
        axes = command.axes or config.spec.axes
        self.world_size = math.prod(axes.values())
        os.environ["WORLD_SIZE"] = str(self.world_size)
        names: dict[str, Any] = {
            "rank": config.rank,
            "local_rank": config.local_rank,
            "world_size": self.world_size,
        }
        if not config.spec.torch:
            return names, None
        import torch
        import torch.distributed as dist

        device = torch.device(self._device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        names |= {"device": device, "torch": torch, "dist": dist}
        if not config.spec.process_group:
            return names, None
        if self._groups is None:
            from meshbook.rank.process_groups.groups import ProcessGroups
            from meshbook.rank.process_groups.store import MeshStore

            self._store = MeshStore(
                self._context,
                config.store_address or command.store_address,
                config.token,
                timeout_s=_FORM_TIMEOUT_S,
                listen_on=config.address,
                server_key=config.store_key,
                clock=self.clock.now,
            )
            groups = ProcessGroups(self.ring, collective_timeout_s=config.spec.group_timeout_s, exits=self.exits)
            groups.table.clock = self.clock.now
            groups.solo.origin = lambda: (self._running_file() or "", self._state.running_call_id or "")
            with self._abort_lock:
                self._groups = groups
            if self._early_abort is not None and self._early_abort[1] is not None:
                groups.abort(RankLost(self._early_abort[0]), generation=self._early_abort[1])
            if probes.are_probes_enabled():
                self._groups.observers.append(_CrashLogObserver(self._crash_log, self._running_file))
        assert self._store is not None  # created with the groups
        self._state.groups_forming()
        names["mesh"] = self._groups.form(
            command.generation,
            rank=config.rank,
            world_size=self.world_size,
            store=self._store,
            device=device,
            backend=choose_backend(config, self._device),
            timeout_s=_FORM_TIMEOUT_S,
            axes=axes,
            num_resizes=command.num_resizes,
        )
        return names, dist.get_backend()

    @contextlib.contextmanager
    def solo(self) -> Iterator[None]:
        """Have collectives return at once, without the other ranks; at the end, make the groups that they have."""
        groups = self._groups
        if groups is None:
            yield
            return
        with groups.solo.active(groups.generation or 0):
            yield
            groups.solo.make_missing()

    def call_began(self, call: CallId, label: str, now: float) -> None:
        self._carry_out(self._state.began(call, label, now=now, last_seq=self._last_seq()))

    def conclude(self, call: CallId, outcome: Outcome) -> Outcome:
        """Apply the end of a call to the process groups, and return its outcome corrected by their state."""
        groups = self._groups
        if groups is None:
            self._state.concluded(call, succeeded=True)  # there is nothing to hold
            return outcome
        cause = groups.abort_failure
        if (
            outcome.status == "ok"
            and cause is not None
            and isinstance(cause.error, CollectiveAborted)
            and not cause.was_raised
            and self._state.release_error is not None
            and groups.table.has_nccl
        ):  # an aborted NCCL collective returns as if successful, and results computed from it are garbage
            outcome = Outcome(status="error", error=self._describe_error(cause.error))
        departed = self._state.departed(call)
        if departed and outcome.error is not None:
            transport_cause = departures.find_transport_cause(
                outcome.error,
                self.ring.since(self._state.seq_before(call, 0)),
                departed,
                rank=self._config.rank,
                locate=departures.make_locate(self._running_file(), self._state.cell_title),
            )
            if transport_cause is not None:
                self._state.transport_failed(transport_cause)
                outcome = msgspec.structs.replace(outcome, error=self._describe_error(transport_cause))
        succeeded = outcome.status == "ok"
        groups.call_ended(succeeded=succeeded)
        self._carry_out(self._state.concluded(call, succeeded=succeeded))
        return msgspec.structs.replace(outcome, groups_broken=True) if groups.is_broken else outcome

    def close(self) -> None:
        """Leave the process groups without waiting for the other ranks."""
        if self._groups is not None:
            self._groups.close()

    # ---- the service thread

    def abort(self, reason: str, *, interrupt: bool, generation: int | None = None, call: CallId | None = None) -> None:
        """Free the main thread from a collective that it waits in; on an interrupt only if it waits in one.

        Args:
            generation, call: see `AbortCollectives`.
        """
        with self._abort_lock:  # so that groups that are created meanwhile hear of it
            if self._groups is None:
                self._early_abort = (reason, generation)
                return
        if call is not None:
            generation = (
                self._groups.generation
            )  # read before: groups that are formed once the call has ended are spared
            if self._state.running_call_id != call:
                return
        error = KeyboardInterrupt(reason) if interrupt else RankLost(reason)
        if interrupt and self._groups.table.has_nccl and not self._groups.connector.connecting:
            self._abort_if_stuck(self._groups, error, generation)
        elif not interrupt or self._groups.is_waiting:
            self._groups.abort(error, generation=generation)

    def _abort_if_stuck(self, groups: ProcessGroups, error: BaseException, generation: int | None) -> None:
        """Abort collectives of the device that do not come to their end; at the second Stop of a call at once."""
        call = self._state.running_call_id
        if call is None or call == self._stopping_call:
            groups.abort(error, generation=generation)
            return
        self._stopping_call = call

        def watch() -> None:
            if device_stop.wait_until_stuck(groups.ring, lambda: self._state.running_call_id != call):
                groups.abort(error, generation=generation)

        threading.Thread(target=watch, name="meshbook-stop", daemon=True).start()

    def position(self, about: CallId) -> RankPosition:
        """Return this rank's position in the order of its collectives."""
        state, groups = self._state, self._groups
        running, has_begun, left = state.running_call_id, state.has_begun(about), state.left_call(about)
        since = state.seq_before(about, self._last_seq())  # not begun here: it ran no collectives
        labels = [] if groups is None else [group.label for group in groups.table]
        return RankPosition(
            rank=self._config.rank,
            status="" if left is None else left.status,
            cause=("" if left is None else left.cause)
            if has_begun
            else f"rank {self._config.rank} was stopped before it began the cell",
            is_held_or_idle=running is None or groups is None or groups.table.is_held,
            is_idle=running is None,
            has_other_collective_threads=positions.has_other_collective_threads(self.ring),
            num_groups_created=0 if groups is None else groups.num_groups_created,
            groups=positions.group_positions(labels, self.ring, since),
            has_begun=has_begun,
        )

    def hold_after(self, about: CallId) -> None:
        """Hold collectives after an interrupted call ends here, until it has ended on all ranks."""
        if self._groups is not None:
            self._carry_out(self._state.stop_reported(about))

    def positions_checked(self, command: ResumeCollectives) -> None:
        """Apply the result of a position check: the call has ended on all ranks, and these groups are out of step."""
        if self._groups is not None:
            self._groups.invalidate_named(command.broken_groups, command.reason, generation=command.generation)
            self._carry_out(self._state.positions_checked(command.about_call))

    def ranks_left(self, command: RanksLeft) -> None:
        """Record that other ranks have left a call that this rank runs or will run."""
        self._carry_out(self._state.ranks_left(command.call, command.left_positions))

    def complete_futures(self) -> None:
        """Complete the futures of collectives that have ended unnoticed."""
        if self._groups is not None:
            self._groups.table.complete_futures()

    def end_overdue(self) -> None:
        """End the collectives that have taken too long."""
        if self._groups is not None:
            self._groups.timeouts.end_overdue()

    # ---- effects

    def _carry_out(self, effects: tuple[CallEffect, ...]) -> None:
        for effect in effects:
            groups = self._groups
            assert groups is not None  # there are no effects before groups are formed
            if effect is CallEffect.HOLD:
                groups.table.hold()
            elif effect is CallEffect.RESUME:
                groups.table.resume()
            else:
                thread = threading.Thread(
                    target=self._watch_departures, args=(groups,), name="meshbook-left", daemon=True
                )
                try:
                    thread.start()
                except BaseException:
                    self._state.watch_ended()
                    raise

    def forming_ranks(self) -> Ranks:
        """Return the members of the group that waits for them to connect; () if none does."""
        connecting = self._groups.connector.connecting if self._groups is not None else ()
        return connecting[-1].ranks if connecting else ()

    def _watch_departures(self, groups: ProcessGroups) -> None:
        """Break the groups as soon as a collective of the running call waits for a rank that has left the call."""
        pause = threading.Event()
        try:
            while groups.abort_failure is None:
                watched = self._state.watched_departures()
                if watched is None:
                    return
                call, departed = watched
                if groups.solo.is_active:  # what this rank runs then waits for nobody
                    pause.wait(_LEFT_POLL_S)
                    continue
                generation = groups.generation
                error = departures.find_doomed_wait(
                    self.ring.running(),
                    groups.connector.connecting,
                    departed,
                    rank=self._config.rank,
                    recorded=lambda call=call: self.ring.since(self._state.seq_before(call, 0)),  # type: ignore[misc]
                    locate=departures.make_locate(self._running_file(), self._state.cell_title),
                )
                if error is not None and self._state.release_from(call, error):
                    groups.abort(error, generation=generation)
                pause.wait(_LEFT_POLL_S)
        except BaseException:
            self._state.watch_ended()
            raise
        self._state.watch_ended()

    def _last_seq(self) -> int:
        last = self.ring.last
        return 0 if last is None else last.seq


class _CrashLogObserver:
    """Records each collective where the host finds it should this process die in it; takes about 2 us."""

    def __init__(self, crash_log: CrashLog, running_file: Callable[[], str | None]) -> None:
        self._crash_log, self._running_file = crash_log, running_file

    def begun(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        line = collective.line
        where = ""
        if line is not None:
            location = "the cell" if line.file == self._running_file() else line.file
            where = f", at line {line.line} of {location}"
        self._crash_log.set_note(f"{collective.op} #{collective.group_seq} of {collective.label.ranks_text}{where}")

    def finished(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        pass

    def failed(self, collective: Collective, error: BaseException) -> None:
        pass
