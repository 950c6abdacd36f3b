"""The main thread of a rank: executes one command at a time and reports the end of each.

Does not depend on other ranks, nor on how groups are formed and values are kept.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from meshbook.clock import monotonic, perf_counter
from meshbook.ids import CallId
from meshbook.rank import actor_hooks, limits
from meshbook.rank.call_state import CallState
from meshbook.rank.cells import tracebacks
from meshbook.rank.cells.code_runner import CellRun, CodeRunner
from meshbook.rank.cells.shell import RankShell
from meshbook.rank.checkpoints.door import CheckpointDoor
from meshbook.rank.differences.sentinel_door import SentinelDoor
from meshbook.rank.healing.replay import replay_cells
from meshbook.rank.interrupt import InterruptGate
from meshbook.rank.objects import RankObjects
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.preemption import PreemptionPoint
from meshbook.rank.process_groups.rank_groups import RankGroups
from meshbook.rank.recording.door import RecordingDoor
from meshbook.rank.reporter import Reporter
from meshbook.rank.resharding.door import ReshardingDoor
from meshbook.rank.thread_modes import ThreadModes
from meshbook.wire import codec, messages
from meshbook.wire.crash_log import CrashLog
from meshbook.wire.messages import Outcome, Value

if TYPE_CHECKING:  # it imports torch, which a mesh may not have
    from meshbook.rank.elastic.runs import ElasticRuns

# for values that are fetched completely and never displayed
_NO_PREVIEW = messages.Preview(kind="none", type="", text="")


class Executor:
    """The main thread's command loop. `serve()` runs until the host sends `Exit`."""

    def __init__(
        self,
        rank: int,
        device: str,
        state: CallState,
        shell: RankShell,
        runner: CodeRunner,
        groups: RankGroups,
        objects: RankObjects,
        *,
        output: OutputBuffer,
        gate: InterruptGate,
        reporter: Reporter,
        crash_log: CrashLog,
        checkpoints: CheckpointDoor,
        preemption: PreemptionPoint,
        sentinel: SentinelDoor,
    ) -> None:
        self._checkpoints, self._preemption, self._sentinel = checkpoints, preemption, sentinel
        self._rank, self._state, self._shell, self._runner = rank, state, shell, runner
        self._groups, self._objects = groups, objects
        self._output, self._gate, self._reporter, self._crash_log = output, gate, reporter, crash_log
        self._elastic_runs: ElasticRuns | None = None  # with the first process groups
        self._recording = RecordingDoor(rank, device, shell, groups)
        self._resharding = ReshardingDoor(rank, shell.user_ns, groups, shell.user_names)
        self._handlers: dict[type, Callable[[Any], Outcome]] = {
            messages.RunCell: self._run_cell,
            messages.RunOps: self._run_ops,
            messages.CallFunction: self._call_function,
            messages.Evaluate: self._evaluate,
            messages.SetNames: self._set_names,
            messages.FormGroups: self._form_groups,
            messages.FindSharded: self._find_sharded,
            messages.MoveShards: self._move_shards,
            messages.ReplayCells: self._replay_cells,
            messages.ShareState: self._share_state,
            messages.SaveCheckpoint: self._save_checkpoint,
            messages.RestoreCheckpoint: self._restore_checkpoint,
            messages.DescribeState: self._describe_state,
            messages.CompareTensors: self._compare_tensors,
            messages.SetSentinel: self._set_sentinel,
            messages.RollBack: self._roll_back,
        }

    # ---- the loop

    def serve(self) -> float:
        """Run commands until the host has this rank exit; return how many seconds it may take for that."""
        while True:
            try:
                body = self._reporter.work_socket.receive(self._runner.run_tasks_until_readable)
                command = codec.rank_commands.decode_body(body)
                if isinstance(command, messages.Exit):
                    return command.grace_s
                handler = self._handlers.get(type(command))
                if handler is not None:  # ignores, for example, a late InputReply
                    self._execute(command, handler)
            except zmq.ZMQError:
                raise
            except BaseException as error:
                # A user's signal handler raises wherever the main thread is: an alarm of a finished cell, or
                # DataLoader's when a worker was killed. That must not end the rank.
                self._gate.reset()
                _print_error(error)

    def _execute(self, command: Any, handler: Callable[[Any], Outcome]) -> None:
        started = perf_counter()
        self._gate.begin_call(command.call)
        self._reporter.call_id = command.call
        label = getattr(command, "label", "")
        self._crash_log.clear()
        self._preemption.begin(command.call)
        modes = ThreadModes()
        try:
            if self._elastic_runs is not None:
                self._elastic_runs.call_began(command.call, getattr(command, "source", label))
            self._groups.call_began(command.call, label, monotonic())
            outcome = handler(command)
            self._sentinel.call_ended()
            actor_hooks.call_ended()
        except KeyboardInterrupt:  # between two lines of Meshbook, when no user code is running
            outcome = Outcome(status="interrupted")
        except BaseException as error:
            outcome = Outcome(status="error", error=self._runner.describe_error(error))
        if outcome.status == "interrupted":
            modes.restore()
        seconds = perf_counter() - started
        self._reporter.may_have_sent = False
        try:
            self._report_finished(command.call, label, outcome, seconds)
        except BaseException as error:  # raised by a signal handler, as in `serve`; or the outcome cannot be encoded
            if self._reporter.may_have_sent:  # then the second report may not be read
                _print_error(error)
            outcome = Outcome(status="error", error=self._runner.describe_error(error))
            try:
                self._report_finished(command.call, label, outcome, seconds)
            except BaseException as another:  # without a report the host would wait for this call for ever
                _print_error(another)
                self._report_finished(command.call, label, outcome, seconds, conclude=False)

    def _report_finished(
        self, call: CallId, label: str, outcome: Outcome, seconds: float, *, conclude: bool = True
    ) -> None:
        """Report the end of a call. A second report of the same end is harmless."""
        if conclude:
            outcome = self._groups.conclude(call, outcome)
            if self._elastic_runs is not None:
                self._elastic_runs.call_ended(succeeded=outcome.status == "ok")
        self._output.flush()
        items, seq = self._reporter.pop_remaining_output()
        self._state.ended(call, label, outcome)
        self._gate.reset()
        self._reporter.send(
            messages.RankFinished(
                rank=self._rank,
                call=call,
                outcome=outcome,
                seconds=seconds,
                items=items,
                last_output_seq=seq,
                released_segments=self._objects.reader.drain_released(),
            )
        )

    # ---- commands

    def _run_cell(self, command: messages.RunCell) -> Outcome:
        before = self._recording.recording(command)
        run = self._runner.run(command, before=before)
        if before is not None:
            self._recording.ended(run)
        value = None
        if run.has_result and not command.silent:
            value = self._describe_value(command.call, run.result, command.inline_limit, retain=True)
        return Outcome(run.status, value, run.error, run.bound, run.unbound, next_input=run.next_input)

    def _run_ops(self, command: messages.RunOps) -> Outcome:
        tensors = self._objects.tensors
        tensors.expect_batch(command)
        if command.is_cancelled:
            tensors.skip_batch(command)
            return Outcome(status="ok")
        ran = self._runner.call(lambda: self._sentinel.run_batch(tensors, command))
        if ran.status != "ok":
            tensors.skip_batch(command)
            return Outcome(status=ran.status, error=ran.error)
        answer: dict[str, Any] = ran.result
        payload = answer.pop("value", None)
        value = None if payload is None else Value(preview=_NO_PREVIEW, payload=payload)
        return Outcome(status="ok", value=value, reply=answer or None)

    def _call_function(self, command: messages.CallFunction) -> Outcome:
        function, args, kwargs = self._objects.unpickle(command.function)
        self._objects.inject_globals(function)
        before = self._recording.recording_call(command, function, args, kwargs)

        def call() -> Any:
            if before is not None:
                before()
            return function(*args, **kwargs)

        return self._call_and_describe(command, call, allow_input=command.allow_input, recorded=before is not None)

    def _evaluate(self, command: messages.Evaluate) -> Outcome:
        expression = self._objects.unpickle(command.expression)
        return self._call_and_describe(command, lambda: self._objects.evaluate(expression))

    def _call_and_describe(
        self,
        command: messages.CallFunction | messages.Evaluate,
        function: Callable[[], Any],
        *,
        allow_input: bool = False,
        recorded: bool = False,
    ) -> Outcome:
        called = self._runner.call(function, allow_input=allow_input)
        if recorded:
            self._recording.ended(called)
        if called.status != "ok":
            return Outcome(status=called.status, error=called.error)
        if command.always_retain:
            self._objects.values.store(command.call, called.result)
        value = self._describe_value(command.call, called.result, command.inline_limit, retain=command.retain)
        if command.always_retain:
            value = msgspec.structs.replace(value, ref=command.call)
        return Outcome(status="ok", value=value)

    def _set_names(self, command: messages.SetNames) -> Outcome:
        values = self._objects.unpickle(command.payload)
        for name, value in zip(command.names, values, strict=True):
            self._shell.user_ns[name] = value
        return Outcome(status="ok", bound_names=command.names)

    def _form_groups(self, command: messages.FormGroups) -> Outcome:
        """Form the process groups of this generation; with the first, bind the names that user code finds."""
        is_resized = self._resharding.groups_forming(command)
        try:
            names, backend = self._groups.form(command)
        except Exception as error:
            shortage = limits.explain_fd_shortage(error)
            if shortage is None:
                raise
            raise shortage from error
        if self._elastic_runs is None and (groups := self._groups.process_groups) is not None:
            from meshbook.rank.elastic import loop
            from meshbook.rank.elastic.runs import ElasticRuns

            self._elastic_runs = ElasticRuns(self._shell.user_ns, groups, self._preemption)
            loop.install(self._elastic_runs)
        if command.generation == 1 or "rank" not in self._shell.user_ns:
            self._shell.bind_presets(**names)
        elif is_resized:
            self._shell.rebind_presets(**names)
            self._objects.drop_tensors()
        self._resharding.groups_formed(command)
        return Outcome(status="ok", reply={"backend": backend})

    def _find_sharded(self, command: messages.FindSharded) -> Outcome:
        if self._elastic_runs is not None:
            from meshbook.rank.elastic.rollback import drop_changed  # imports torch, which a mesh may not have

            drop_changed(self._elastic_runs)
        return Outcome(status="ok", reply=self._resharding.find(command))

    def _move_shards(self, command: messages.MoveShards) -> Outcome:
        if command.step == "commit":  # what Stop must not cut short
            self._resharding.commit()
            if self._elastic_runs is not None:
                from meshbook.rank.elastic.rollback import shards_moved  # imports torch, which a mesh may not have

                shards_moved(self._elastic_runs)
            return Outcome(status="ok")
        return _reply_of(self._runner.call(lambda: self._resharding.move(command)))

    def _replay_cells(self, command: messages.ReplayCells) -> Outcome:
        return Outcome(status="ok", reply=replay_cells(command, self._runner, self._groups.solo))

    def _share_state(self, command: messages.ShareState) -> Outcome:
        from meshbook.rank.healing.sharing import share_state  # imports torch, which a mesh may not have

        groups = self._groups.process_groups
        assert groups is not None  # ranks without groups are not asked
        names, objects, solo = self._shell.user_names(), self._objects, self._groups.solo
        recorded = self._elastic_runs.replicas(self._rank) if self._elastic_runs is not None else {}
        parts = command, self._rank, self._shell.user_ns, names, groups, objects, recorded, solo
        shared = self._runner.call(lambda: share_state(*parts))
        if shared.status != "ok":
            return Outcome(status=shared.status, error=shared.error)
        bound = tuple(shared.result["restored"])
        return Outcome(
            status="ok", reply=shared.result, bound_names=tuple(name for name in bound if name.isidentifier())
        )

    def _save_checkpoint(self, command: messages.SaveCheckpoint) -> Outcome:
        return _reply_of(self._runner.call(lambda: self._checkpoints.save(command)))

    def _restore_checkpoint(self, command: messages.RestoreCheckpoint) -> Outcome:
        restored = self._runner.call(lambda: self._checkpoints.restore(command))
        bound = tuple(restored.result["bound"]) if restored.status == "ok" else ()
        return Outcome(status=restored.status, error=restored.error, bound_names=bound)

    def _describe_state(self, command: messages.DescribeState) -> Outcome:
        from meshbook.rank.differences import forward, state  # they import torch, which a mesh may not have

        names, values, ring = self._shell.user_names(), self._shell.user_ns, self._groups.ring
        if command.forward:
            return _reply_of(self._runner.call(lambda: forward.describe_forward(command.forward, values)))
        return _reply_of(self._runner.call(lambda: state.describe_state(command.names, values, names, ring)))

    def _compare_tensors(self, command: messages.CompareTensors) -> Outcome:
        from meshbook.rank.differences.comparing import compare_tensors  # imports torch, which a mesh may not have

        parts = self._rank, command.comparisons, self._shell.user_ns, command.forward
        return _reply_of(self._runner.call(lambda: compare_tensors(*parts)))

    def _set_sentinel(self, command: messages.SetSentinel) -> Outcome:
        return _reply_of(self._runner.call(lambda: self._sentinel.switch(on=command.on)))

    def _roll_back(self, command: messages.RollBack) -> Outcome:
        runs = self._elastic_runs
        if runs is None:
            return Outcome(status="ok", reply={"names": [], "step": 0})
        from meshbook.rank.elastic.rollback import roll_back  # imports torch, which a mesh may not have

        rolled = self._runner.call(lambda: roll_back(runs, command.about_calls, command.names))
        return Outcome(status=rolled.status, error=rolled.error, reply=rolled.result)

    def _describe_value(self, call: str, result: Any, inline_limit: int, *, retain: bool) -> Value:
        return self._objects.describe(call, result, self._runner.preview(result), inline_limit, retain=retain)


def _reply_of(run: CellRun) -> Outcome:
    """Return the outcome of a call of Meshbook's own, with what it returned as the reply."""
    reply = msgspec.to_builtins(run.result) if run.status == "ok" else None
    return Outcome(status=run.status, error=run.error, reply=reply)


def _print_error(error: BaseException) -> None:
    with contextlib.suppress(Exception):
        tracebacks.strip_meshbook_frames(error)
        traceback.print_exception(error)
