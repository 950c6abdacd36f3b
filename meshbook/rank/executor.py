"""The main thread of a rank: executes one command at a time and reports the end of each.

Uses the shell, the groups and the object store; does not depend on other ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from meshbook.clock import monotonic, perf_counter
from meshbook.diagnose.source_files import cell_label, is_user_file
from meshbook.errors import CollectiveAborted, RankLost, StartError, TransferError
from meshbook.ids import CallId
from meshbook.rank import expressions, limits, positions, probes, tracebacks
from meshbook.rank.capture import OutputBuffer
from meshbook.rank.ring import Collective, CollectiveRing, UserLine
from meshbook.rank.service import Reporter
from meshbook.rank.shell import InterruptGate, RankShell
from meshbook.rank.snapshot import FinishedCall, RunningCall
from meshbook.rank.value_store import ValueStore
from meshbook.wire import codec, messages, pickling, spawn
from meshbook.wire.buffers import SegmentPool, SegmentReader
from meshbook.wire.crash_log import CrashLog
from meshbook.wire.messages import Outcome, Value

if TYPE_CHECKING:  # they import torch, which a mesh may not have
    from meshbook.rank.groups import ProcessGroups
    from meshbook.rank.store import MeshStore
    from meshbook.rank.tensors.engine import CurrentOp, RankTensors

# Seconds that ranks wait for each other while process groups are formed.
_FORM_TIMEOUT_S = 60.0

# Plain values (numbers, short strings, small tuples of them) up to this size are sent in the report of their cell.
_INLINE_PLAIN_BYTES = 4096

# Seconds between checks whether a collective waits for a rank that has left the call.
_LEFT_POLL_S = 0.1

# Limit of calls with a stored ring position or stored departures: some may be queued behind the running one.
_MAX_REMEMBERED_CALLS = 256

# for values that are fetched completely and never displayed
_NO_PREVIEW = messages.Preview(kind="none", type="", text="")


class Executor:
    """The main thread's command loop. `serve()` runs until the host sends `Exit`."""

    def __init__(
        self,
        config: spawn.RankConfig,
        shell: RankShell,
        output: OutputBuffer,
        gate: InterruptGate,
        reporter: Reporter,
        crash_log: CrashLog,
    ) -> None:
        self.config = config
        self.shell = shell
        self.running_call_id: CallId | None = None  # the call on the main thread
        self.running_call: RunningCall | None = None  # details of it, for snapshots
        self.last_finished_call: FinishedCall | None = None  # how the previous call ended
        self.awaiting_input = False  # waits for the user to answer input()
        self.ring = CollectiveRing(detailed=probes.are_probes_enabled())
        self.pool = SegmentPool()
        self.reader = SegmentReader()
        self._output, self._gate, self._reporter = output, gate, reporter
        self._groups: ProcessGroups | None = None
        self._store: MeshStore | None = None  # for all generations of the groups
        self._tensors: RankTensors | None = None  # set once a client has used it
        self._crash_log = crash_log
        self._value_store = ValueStore(self.pool)
        self.resolvers: dict[str, Callable[[str], Any]] = {}  # kind of reference -> function that resolves its key
        self.device = "cpu"
        self._seq_before_call: dict[CallId, int] = {}  # recent calls -> seq of the last collective before them
        self._left_positions: dict[
            CallId, dict[int, messages.RankPosition]
        ] = {}  # running or queued calls -> positions of the ranks that have left them
        self._is_watching_left = False  # a thread checks for collectives that wait for departed ranks
        self._holding_call: CallId | None = None  # the call whose end holds the collectives
        self._release_error: CollectiveAborted | None = None  # the error that released this rank from the running call
        self._leave_reason = ""  # why others wait in vain for this rank, if its last call failed
        self._handlers: dict[type, Callable[[Any], Outcome]] = {
            messages.RunCell: self._run_cell,
            messages.RunOps: self._run_ops,
            messages.CallFunction: self._call_function,
            messages.Evaluate: self._evaluate,
            messages.SetNames: self._set_names,
            messages.DeleteNames: self._delete_names,
            messages.FormGroups: self._handle_form_groups,
        }

    # ---- the loop

    def serve(self) -> None:
        work = self._reporter.work_socket
        while True:
            try:
                command = codec.rank_commands.decode(work.recv_multipart())
                if isinstance(command, messages.Exit):
                    return
                handler = self._handlers.get(type(command))
                if handler is not None:  # ignores, for example, a late InputReply
                    self._execute(command, handler)
            except zmq.ZMQError:
                raise
            except BaseException as error:
                # A user's signal handler raises wherever the main thread is: an alarm of a finished cell, or
                # DataLoader's when a worker was killed. That must not end the rank.
                self._gate.reset()
                with contextlib.suppress(Exception):
                    tracebacks.strip_meshbook_frames(error)
                    traceback.print_exception(error)

    def _execute(self, command: Any, handler: Callable[[Any], Outcome]) -> None:
        started = perf_counter()
        self._gate.reset()  # an interrupt at the very end of the last call may have left it open
        self.running_call_id = self._reporter.call_id = self._gate.call_id = command.call
        label = getattr(command, "label", "")
        self.running_call = RunningCall(command.call, label, monotonic())
        self._crash_log.clear()
        last = self.ring.last
        _store_bounded(self._seq_before_call, command.call, 0 if last is None else last.seq)
        self._release_error = None
        if command.call in self._left_positions:
            self._start_left_watcher()
        torch: Any = sys.modules.get("torch")
        grad_enabled = torch is None or torch.is_grad_enabled()
        try:
            outcome = handler(command)
        except KeyboardInterrupt:  # between two lines of Meshbook, when no user code is running
            outcome = Outcome(status="interrupted")
        except BaseException as error:
            outcome = Outcome(status="error", error=self.shell.describe_error(error))
        if outcome.status == "interrupted" and torch is not None:
            torch.set_grad_enabled(grad_enabled)  # an interrupt can end `no_grad` before it has restored the mode
        seconds = perf_counter() - started
        try:
            self._report_finished(command.call, label, outcome, seconds)
        except BaseException as error:  # raised by a signal handler, as in `serve`; or the outcome cannot be encoded
            outcome = Outcome(status="error", error=self.shell.describe_error(error))
            self._report_finished(command.call, label, outcome, seconds)

    def _report_finished(self, call: CallId, label: str, outcome: Outcome, seconds: float) -> None:
        """Report the end of a call. A second report of the same end is harmless."""
        if self._groups is not None:
            outcome = self._apply_to_groups(call, outcome)
        self._output.flush()
        items, seq = self._reporter.pop_remaining_output()
        self.last_finished_call = FinishedCall(call, label, outcome, monotonic())
        self._leave_reason = self._describe_leave_reason(outcome)
        self.running_call_id = self.running_call = None
        self._left_positions.pop(call, None)
        self._gate.reset()
        self._reporter.send(
            messages.RankFinished(
                rank=self.config.rank,
                call=call,
                outcome=outcome,
                seconds=seconds,
                items=items,
                last_output_seq=seq,
                released_segments=self.reader.drain_released(),
            )
        )

    def _apply_to_groups(self, call: CallId, outcome: Outcome) -> Outcome:
        """Apply the end of a call to the process groups, and return its outcome corrected by their state."""
        groups = self._groups
        assert groups is not None
        cause = groups.abort_failure
        if (
            outcome.status == "ok"
            and cause is not None
            and isinstance(cause.error, CollectiveAborted)
            and not cause.was_raised
            and self._release_error is not None
            and groups.has_nccl
        ):  # an aborted NCCL collective returns as if successful, and results computed from it are garbage
            outcome = Outcome(status="error", error=self.shell.describe_error(cause.error))
        outcome = self._replace_transport_error(call, outcome)
        groups.call_ended(succeeded=outcome.status == "ok")
        if outcome.status != "ok" or self._holding_call == call:
            self._holding_call = call
            groups.hold_collectives()
        return msgspec.structs.replace(outcome, groups_broken=True) if groups.is_broken else outcome

    def _replace_transport_error(self, call: CallId, outcome: Outcome) -> Outcome:
        """Replace a gloo connection error by its cause.

        A rank that waits for a departed rank may first see a third rank, released before it, close its connections.
        Only the cause is informative.
        """
        error, left_positions = outcome.error, self._left_positions.get(call)
        closed = error is not None and error.ename == "RuntimeError" and "gloo/transport" in error.evalue
        if error is None or not left_positions or not closed:
            return outcome
        for collective in reversed(self.ring.since(self._seq_before_call.get(call, 0))):
            for left in left_positions.values():
                if collective.error is not None and positions.can_never_complete(collective, left, self.config.rank):
                    aborted = self._make_aborted_error(
                        collective.op, f"{collective.op} #{collective.group_seq}", collective.line, left
                    )
                    self._release_error = self._release_error or aborted
                    return msgspec.structs.replace(outcome, error=self.shell.describe_error(aborted))
        return outcome

    # ---- commands

    def _run_cell(self, command: messages.RunCell) -> Outcome:
        run = self.shell.run(command)
        value = None
        if run.has_result and not command.silent:
            value = self._describe_value(command.call, run.result, command.inline_limit, retain=True)
        return Outcome(
            status=run.status, value=value, error=run.error, bound_names=run.bound, deleted_names=run.unbound
        )

    def _run_ops(self, command: messages.RunOps) -> Outcome:
        tensors = self.tensors
        tensors.expect_batch(command)
        if command.is_cancelled:
            tensors.skip_batch(command)
            return Outcome(status="ok")
        ran = self.shell.call(lambda: tensors.run(command))
        if ran.status != "ok":
            tensors.skip_batch(command)
            return Outcome(status=ran.status, error=ran.error)
        answer: dict[str, Any] = ran.result
        payload = answer.pop("value", None)
        value = None if payload is None else Value(preview=_NO_PREVIEW, payload=payload)
        return Outcome(status="ok", value=value, reply=answer or None)

    @property
    def tensors(self) -> RankTensors:
        """The data behind controllers' remote tensors on this rank."""
        if self._tensors is None:
            import torch

            from meshbook.rank.tensors.engine import RankTensors

            self._tensors = RankTensors(
                self.config.rank,
                torch.device(self.device),
                self._groups,
                load=self._unpickle,
                dump=lambda thing: self._value_store.dump(self.running_call_id or "", thing),
                resolve=self.resolve,
                defer_interrupts=self._gate.defer_interrupts,
            )
        return self._tensors

    @property
    def current_operation(self) -> CurrentOp | None:
        """The running operation on remote tensors (`rank.tensors.engine.CurrentOp`); None if none runs."""
        return None if self._tensors is None else self._tensors.current_op()

    def _call_function(self, command: messages.CallFunction) -> Outcome:
        function, args, kwargs = self._unpickle(command.function)
        self._inject_globals(function)
        return self._call_and_describe(command, lambda: function(*args, **kwargs))

    def _evaluate(self, command: messages.Evaluate) -> Outcome:
        expression = self._unpickle(command.expression)
        return self._call_and_describe(
            command, lambda: expressions.evaluate(expression, self.shell.user_ns, self._value_store, self.resolve)
        )

    def _call_and_describe(
        self, command: messages.CallFunction | messages.Evaluate, function: Callable[[], Any]
    ) -> Outcome:
        called = self.shell.call(function)
        if called.status != "ok":
            return Outcome(status=called.status, error=called.error)
        if command.always_retain:
            self._value_store.store(command.call, called.result)
        value = self._describe_value(command.call, called.result, command.inline_limit, retain=command.retain)
        if command.always_retain:
            value = msgspec.structs.replace(value, ref=command.call)
        return Outcome(status="ok", value=value)

    def _set_names(self, command: messages.SetNames) -> Outcome:
        values = self._unpickle(command.payload)
        if command.per_rank:
            values = values[self.config.rank]
        for name, value in zip(command.names, values, strict=True):
            self.shell.user_ns[name] = value
        return Outcome(status="ok", bound_names=command.names)

    def _delete_names(self, command: messages.DeleteNames) -> Outcome:
        for name in command.names:
            self.shell.user_ns.pop(name, None)
        return Outcome(status="ok", deleted_names=command.names)

    def _handle_form_groups(self, command: messages.FormGroups) -> Outcome:
        try:
            return self._form_groups(command)
        except Exception as error:
            shortage = limits.explain_fd_shortage(error)
            if shortage is None:
                raise
            raise shortage from error

    def _form_groups(self, command: messages.FormGroups) -> Outcome:
        """Form the process groups of this generation; with the first, bind the names that user code finds."""
        spec = self.config.spec
        if not spec.torch:
            self.shell.bind_presets(
                rank=self.config.rank, local_rank=self.config.local_rank, world_size=self.config.world_size
            )
            return Outcome(status="ok", reply={"backend": None})
        import torch
        import torch.distributed as dist

        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        names: dict[str, Any] = {
            "rank": self.config.rank,
            "local_rank": self.config.local_rank,
            "world_size": self.config.world_size,
            "device": device,
            "torch": torch,
            "dist": dist,
        }
        backend = None
        if spec.process_group:
            from meshbook.rank.groups import ProcessGroups
            from meshbook.rank.store import MeshStore

            if self._groups is None:
                context = self._reporter.work_socket.context
                self._store = MeshStore(context, command.store_address, self.config.token, timeout_s=_FORM_TIMEOUT_S)
                self._groups = ProcessGroups(self.ring, collective_timeout_s=spec.group_timeout_s)
                if probes.are_probes_enabled():
                    self._groups.observers.append(_CrashLogObserver(self._crash_log, self.shell))
            assert self._store is not None  # created with the groups
            self._holding_call = None  # checks of calls on the former groups are obsolete
            names["mesh"] = self._groups.form(
                command.generation,
                rank=self.config.rank,
                world_size=self.config.world_size,
                store=self._store,
                device=device,
                timeout_s=_FORM_TIMEOUT_S,
                axes=spec.axes,
            )
            backend = dist.get_backend()
        if command.generation == 1 or "rank" not in self.shell.user_ns:
            self.shell.bind_presets(**names)
        return Outcome(status="ok", reply={"backend": backend})

    # ---- values

    def _describe_value(self, call: str, result: Any, inline_limit: int, *, retain: bool) -> Value:
        """Return a value as it is reported: its preview, plus its pickle if small, else a reference to fetch it later.

        Plain values are always included; others only up to `inline_limit` bytes of pickle.
        """
        preview = self.shell.preview(result)
        if preview.kind in ("plain", "none") and not preview.truncated:
            inline_limit = max(inline_limit, _INLINE_PLAIN_BYTES)
        payload = pickling.dump_small(result, inline_limit) if inline_limit else None
        if payload is not None:
            return Value(preview=preview, payload=payload)
        if not retain:
            return Value(preview=preview, payload=self._value_store.dump(call, result))
        self._value_store.store(call, result)
        return Value(preview=preview, ref=call)

    def _inject_globals(self, function: Any) -> None:
        """Add missing globals to a notebook function that was sent by value.

        It has only the globals that were pickled with it; other names (`rank`, `dist`, what cells have bound) resolve
        as if it had been defined in a cell.
        """
        function_globals = getattr(function, "__globals__", None)
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if function_globals is None or function_globals is getattr(module, "__dict__", None):
            return
        for name in _iter_global_names(function.__code__):
            if name not in function_globals and name in self.shell.user_ns:
                function_globals[name] = self.shell.user_ns[name]

    def _unpickle(self, payload: messages.Payload) -> Any:
        return pickling.load(payload, reader=self.reader, resolve=self.resolve)

    def resolve(self, reference: str) -> Any:
        """Return this rank's object for a handle in the arguments: `name:x`, `ref:<call>`, `tensor:<engine>#<id>`."""
        kind, _, key = reference.partition(":")
        if kind == "ref":
            if key not in self._value_store:
                raise TransferError(f"the object behind this handle was released on rank {self.config.rank}")
            return self._value_store[key]
        if kind == "tensor":
            return self.tensors.resolve(key)
        if kind in self.resolvers:
            return self.resolvers[kind](key)
        if key not in self.shell.user_ns:
            raise NameError(f"name {key!r} is not defined on rank {self.config.rank}")
        return self.shell.user_ns[key]

    # ---- called by the service thread

    def interrupt_call(self, call: CallId) -> None:
        """Interrupt this call, even if the main thread has not begun it yet; never the one after it."""
        self._gate.interrupt_call(call)

    def unblock(self, reason: str, *, interrupt: bool) -> None:
        """Free the main thread from a collective that it waits in; on an interrupt only if it waits in one."""
        if self._groups is None or (interrupt and not self._groups.is_waiting):
            return
        self._groups.abort(KeyboardInterrupt(reason) if interrupt else RankLost(reason))

    def position(self, about: CallId) -> messages.RankPosition:
        """Return this rank's position in the order of its collectives."""
        running, done, groups = self.running_call_id, self.last_finished_call, self._groups
        last = self.ring.last
        # not begun here: it ran no collectives
        since = self._seq_before_call.get(about, 0 if last is None else last.seq)
        return messages.RankPosition(
            rank=self.config.rank,
            last_call=None if done is None else done.call,
            last_status="" if done is None else done.outcome.status,
            cause=self._leave_reason,
            is_held_or_idle=running is None or groups is None or groups.is_held,
            is_idle=running is None,
            has_other_collective_threads=positions.has_other_collective_threads(self.ring),
            num_groups_created=0 if groups is None else groups.num_groups_created,
            groups=()
            if groups is None
            else positions.group_positions([group.label for group in groups.all_groups()], self.ring, since),
        )

    def _describe_leave_reason(self, outcome: Outcome) -> str:
        """Return why others wait for this rank in vain, "rank 1 raised ValueError: no at line 3"; "" on success."""
        error = outcome.error
        if outcome.status == "ok":
            return ""
        if error is not None and error.released_from is not None and self._release_error is not None:
            return self._release_error.cause  # it left because of another rank, which is the cause of all
        if outcome.status == "interrupted" or error is None:
            return f"rank {self.config.rank} was stopped"
        frame = next((frame for frame in reversed(error.frames) if is_user_file(frame.file)), None)
        location = "" if frame is None else f" at {_format_location(frame.file, frame.line, error.frames[0].file)}"
        text = error.evalue.splitlines()[0] if error.evalue else ""
        return f"rank {self.config.rank} raised {error.ename}{': ' if text else ''}{text}{location}"

    def hold_collectives_after(self, about: CallId) -> None:
        """Hold collectives after an interrupted call ends here, until it has ended on all ranks.

        A later call that has already begun is not affected.
        """
        if self._groups is None or self.running_call_id not in (None, about):
            return
        self._holding_call = about
        if self.running_call_id is None:
            self._groups.hold_collectives()

    def complete_futures(self) -> None:
        """Complete the futures of collectives that have ended unnoticed."""
        if self._groups is not None:
            self._groups.complete_futures()

    def groups_checked(self, command: messages.ResumeCollectives) -> None:
        """Apply the result of a position check: the call has ended on all ranks, and these groups are out of step."""
        if self._groups is None:
            return
        self._groups.invalidate_named(command.broken_groups, command.reason, generation=command.generation)
        if self._holding_call == command.about_call:
            # Its host may have cancelled it before it started here, and still name it: then it holds nothing.
            self._holding_call = None
            self._groups.resume_collectives()

    def ranks_left(self, command: messages.RanksLeft) -> None:
        """Record that other ranks have left a call that this rank runs or will run."""
        positions_by_rank = _store_bounded(
            self._left_positions, command.call, self._left_positions.get(command.call, {})
        )
        positions_by_rank.update({left.rank: left for left in command.left_positions})
        if self.running_call_id == command.call:
            self._start_left_watcher()

    def _start_left_watcher(self) -> None:
        if not self._is_watching_left and self._groups is not None:
            self._is_watching_left = True
            threading.Thread(target=self._watch_left_ranks, name="meshbook-left", daemon=True).start()

    def _watch_left_ranks(self) -> None:
        """Break the groups as soon as a collective of the running call waits for a rank that has left the call."""
        pause = threading.Event()
        groups = self._groups
        assert groups is not None
        try:
            while (
                (call := self.running_call_id) is not None
                and call in self._left_positions
                and groups.abort_failure is None
            ):
                error = self._find_doomed_wait(tuple(self._left_positions[call].values()))
                if error is not None and self.running_call_id == call:
                    self._release_error = error
                    groups.abort(error, generation=groups.generation)
                    return
                pause.wait(_LEFT_POLL_S)
        finally:
            self._is_watching_left = False

    def _find_doomed_wait(self, left_positions: tuple[messages.RankPosition, ...]) -> CollectiveAborted | None:
        """Return the error for a thread here that waits for a rank that has left the call; None if no thread does."""
        for collective in self.ring.running():
            for left in left_positions:
                if positions.can_never_complete(collective, left, self.config.rank):
                    return self._make_aborted_error(
                        collective.op, f"{collective.op} #{collective.group_seq}", collective.line, left
                    )
        for label in self._groups.connecting if self._groups is not None else ():
            for left in left_positions:
                if positions.can_never_form(label, left):
                    return self._make_aborted_error("new_group", "new_group", None, left)
        return None

    def _make_aborted_error(
        self, op: str, what: str, line: UserLine | None, left: messages.RankPosition
    ) -> CollectiveAborted:
        where = op if line is None else f"{op} at {_format_location(line.file, line.line, self.shell.running_file)}"
        prefix = f"rank {left.rank} ended the cell without coming to"
        reason = left.cause or f"{prefix} it"
        cause = left.cause or f"{prefix} {what}"  # for ranks that wait for this rank in turn
        return CollectiveAborted(f"{what} cannot be completed: {reason}", ranks=(left.rank,), cause=cause, where=where)

    def release(self, refs: tuple[str, ...], segments: tuple[str, ...]) -> None:
        self._value_store.release(refs, segments)

    def drop_client(self, client: str) -> None:
        """Release the data held for a client that has disconnected."""
        self._value_store.drop_client(client)
        if self._tensors is not None:
            self._tensors.drop_client(client)

    # ---- user input

    def request_input(self, prompt: str, password: bool) -> str:
        """Return the user's reply from the notebook; input() and getpass() call this.

        Raises:
            EOFError: no client can reply.
            KeyboardInterrupt: the user interrupted the cell instead.
        """
        work = self._reporter.work_socket
        call = self.running_call_id
        if call is None or not self.shell.allow_input:
            raise EOFError(
                "input() can be answered only while a cell of a notebook or terminal runs; "
                "give the value as a variable instead"
            )
        self._output.flush()
        self._reporter.send_output(work)
        self.awaiting_input = True  # set before the request is sent
        try:
            self._reporter.send(
                messages.RankInputRequest(rank=self.config.rank, call=call, prompt=prompt, password=password)
            )
            while True:
                work.poll()  # a SIGINT raises here, with no message partly received
                reply = codec.rank_commands.decode(work.recv_multipart())
                if isinstance(reply, messages.InputReply) and reply.target == call:
                    if reply.interrupted:
                        raise KeyboardInterrupt
                    if reply.text is None:
                        raise EOFError("there is nobody to ask for input() here")
                    return reply.text
        finally:
            self.awaiting_input = False

    # ---- start and end

    def choose_device(self) -> str:
        """Return `cuda:<local rank>` when there is a GPU for every rank of this host, else `cpu`."""
        spec = self.config.spec
        if spec.torch and spec.device != "cpu":
            import torch

            num_gpus = torch.cuda.device_count()
            if spec.device == "cuda" and not num_gpus:
                raise StartError("cuda was asked for, and this host has no GPU that torch can use; try --device cpu")
            if num_gpus >= self.config.local_world_size or spec.device == "cuda":
                self.device = f"cuda:{self.config.local_rank % max(1, num_gpus)}"
        return self.device

    def close(self) -> None:
        """Leave the process groups without waiting for the other ranks."""
        if self._groups is not None and "torch" in sys.modules:
            self._groups.close()
        self.pool.close()


def _format_location(file: str, line: int, running_file: str | None) -> str:
    """Return `line 3` for the running cell, `line 3 of cell 2` for another one, `train.py:3` for a file."""
    if file == running_file:
        return f"line {line}"
    cell = cell_label(file)
    return f"line {line} of {cell}" if cell is not None else f"{os.path.basename(file)}:{line}"


def _store_bounded(values_by_call: dict[CallId, Any], call: CallId, value: Any) -> Any:
    """Store a value for a call, and drop those of the oldest calls beyond the limit."""
    values_by_call[call] = value
    while len(values_by_call) > _MAX_REMEMBERED_CALLS:
        del values_by_call[next(iter(values_by_call))]
    return value


class _CrashLogObserver:
    """Records each collective where the host finds it should this process die in it; takes about 2 us."""

    def __init__(self, crash_log: CrashLog, shell: RankShell) -> None:
        self._crash_log, self._shell = crash_log, shell

    def begun(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        line = collective.line
        where = ""
        if line is not None:
            location = "the cell" if line.file == self._shell.running_file else line.file
            where = f", at line {line.line} of {location}"
        self._crash_log.set_note(f"{collective.op} #{collective.group_seq} of {collective.label.ranks_text}{where}")

    def finished(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        pass


def _iter_global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function uses, also in functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iter_global_names(constant)
