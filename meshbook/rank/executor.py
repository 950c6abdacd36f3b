"""What a rank does on its main thread: one command at a time, each ended by a report.

Knows the shell, the groups and the object store; knows nothing of other ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import msgspec
import zmq

from meshbook.clock import monotonic, perf_counter
from meshbook.diagnose.code import cell_of, is_user
from meshbook.errors import CollectiveAborted, RankLost, StartError, TransferError
from meshbook.ids import CallId
from meshbook.rank import failures, limits, paths, positions, probes
from meshbook.rank.capture import Output
from meshbook.rank.kept import Kept
from meshbook.rank.ring import Collective, Ring, UserLine
from meshbook.rank.service import Reporter
from meshbook.rank.shell import InterruptGate, RankShell
from meshbook.rank.snapshot import Doing, Done
from meshbook.wire import birth, codec, messages, pickling
from meshbook.wire.buffers import SegmentPool, SegmentReader
from meshbook.wire.lastwords import LastWords
from meshbook.wire.messages import Outcome, Value

# Seconds that ranks wait for each other while process groups are formed.
_FORM_TIMEOUT_S = 60.0

# Plain values (numbers, short strings, small tuples of them) ride in the report of the cell that made them.
_PLAIN_BYTES = 4096

# Seconds between looks whether a collective waits for a rank that has left the call.
_LEFT_LOOK_S = 0.1

# Calls whose place in the ring, or whose leavers, are remembered: some may be queued behind the one that runs.
_CALLS = 256

_NO_PREVIEW = messages.Preview(kind="none", type="", text="")  # of what is asked for whole and shown by nobody


class Executor:
    """The main thread's work. `serve()` runs until the host says `Exit`."""

    def __init__(
        self,
        told: birth.RankBirth,
        shell: RankShell,
        output: Output,
        gate: InterruptGate,
        reporter: Reporter,
        words: LastWords,
    ) -> None:
        self.told = told
        self.shell = shell
        self.running: CallId | None = None  # the call on the main thread
        self.doing: Doing | None = None  # more of it, for whoever looks
        self.done: Done | None = None  # how the one before it ended
        self.asking = False  # waits for the user to answer input()
        self.ring = Ring(detailed=probes.switched_on())
        self.pool = SegmentPool()
        self.reader = SegmentReader()
        self._output, self._gate, self._reporter = output, gate, reporter
        self._groups: Any = None
        self._store: Any = None  # rank.store.MeshStore, for all epochs of the groups
        self._tensors: Any = None  # rank.tensors.engine.Tensors, once a client has used it
        self._words = words
        self._kept = Kept(self.pool)
        self.resolvers: dict[str, Callable[[str], Any]] = {}  # kind of reference -> who knows what is behind such
        self.device = "cpu"
        self._begins: dict[CallId, int] = {}  # calls begun last -> number of the last collective before them
        self._left: dict[CallId, dict[int, messages.RankPosition]] = {}  # calls that run or will -> who has left them
        self._watching = False  # a thread looks after collectives that wait for ranks which have left
        self._held_for: CallId | None = None  # the call whose end has collectives held
        self._because: CollectiveAborted | None = None  # what this rank was released with from the call that runs
        self._left_because = ""  # why others wait in vain for this rank, if its last call did not end well
        self._does: dict[type, Callable[[Any], Outcome]] = {
            messages.RunCell: self._run_cell,
            messages.RunOps: self._run_ops,
            messages.CallFunction: self._call_function,
            messages.Evaluate: self._evaluate,
            messages.SetNames: self._set_names,
            messages.DeleteNames: self._delete_names,
            messages.FormGroups: self._form_groups_or_say_why_not,
        }

    # ---- the loop

    def serve(self) -> None:
        work = self._reporter.work
        while True:
            try:
                command = codec.rank_commands.decode(work.recv_multipart())
                if isinstance(command, messages.Exit):
                    return
                act = self._does.get(type(command))
                if act is not None:  # a late ReplyInput, for example, is nobody's any more
                    self._do(command, act)
            except zmq.ZMQError:
                raise
            except BaseException as error:
                # A signal handler of the user's raises wherever the main thread is: an alarm of a cell that is over,
                # or DataLoader's when a worker was killed. That must not end the rank.
                self._gate.rest()
                with contextlib.suppress(Exception):
                    failures.cut_own_frames(error)
                    traceback.print_exception(error)

    def _do(self, command: Any, act: Callable[[Any], Outcome]) -> None:
        started = perf_counter()
        self._gate.rest()  # a Stop at the very end of the last call may have left it open
        self.running = self._reporter.call = self._gate.name = command.call
        label = getattr(command, "label", "")
        self.doing = Doing(command.call, label, monotonic())
        self._words.restart()
        last = self.ring.last
        _remember(self._begins, command.call, 0 if last is None else last.seq)
        self._because = None
        if command.call in self._left:
            self._watch_left()
        torch: Any = sys.modules.get("torch")
        with_gradients = torch is None or torch.is_grad_enabled()
        try:
            outcome = act(command)
        except KeyboardInterrupt:  # between two lines of ours, where no user code is left to end
            outcome = Outcome(status="interrupted")
        except BaseException as error:
            outcome = Outcome(status="error", error=self.shell.describe_error(error))
        if outcome.status == "interrupted" and torch is not None:
            torch.set_grad_enabled(with_gradients)  # a Stop can end `no_grad` before it has put back what was
        seconds = perf_counter() - started
        try:
            self._finish(command.call, label, outcome, seconds)
        except BaseException as error:  # a signal handler's, as in `serve`; or what cannot be encoded
            outcome = Outcome(status="error", error=self.shell.describe_error(error))
            self._finish(command.call, label, outcome, seconds)

    def _finish(self, call: CallId, label: str, outcome: Outcome, seconds: float) -> None:
        """Report the end of a call. A second report of the same end does no harm."""
        if self._groups is not None:
            outcome = self._with_groups(call, outcome)
        self._output.drain()
        items, seq = self._reporter.take_rest()
        self.done = Done(call, label, outcome, monotonic())
        self._left_because = self._why_it_left(outcome)
        self.running = self.doing = None
        self._left.pop(call, None)
        self._gate.rest()
        self._reporter.send(
            messages.RankFinished(
                rank=self.told.rank,
                call=call,
                outcome=outcome,
                seconds=seconds,
                items=items,
                said_seq=seq,
                released=self.reader.take_released(),
            )
        )

    def _with_groups(self, call: CallId, outcome: Outcome) -> Outcome:
        """What the end of a call means for the process groups, and their end for the call."""
        groups = self._groups
        cause = groups.severed_with
        if (
            outcome.status == "ok"
            and cause is not None
            and isinstance(cause.error, CollectiveAborted)
            and not cause.was_raised
            and self._because is not None
            and groups.on_nccl
        ):  # an aborted collective of NCCL returns as if all were well, and what was computed from it is garbage
            outcome = Outcome(status="error", error=self.shell.describe_error(cause.error))
        outcome = self._with_cause(call, outcome)
        groups.call_ended(well=outcome.status == "ok")
        if outcome.status != "ok" or self._held_for == call:
            self._held_for = call
            groups.hold()
        return msgspec.structs.replace(outcome, groups_broken=True) if groups.broken else outcome

    def _with_cause(self, call: CallId, outcome: Outcome) -> Outcome:
        """A rank that waited for one that had left may hear first that a third one, released before it, has closed its
        connections. That says nothing to anybody; the cause does."""
        error, lefts = outcome.error, self._left.get(call)
        closed = error is not None and error.ename == "RuntimeError" and "gloo/transport" in error.evalue
        if error is None or not lefts or not closed:
            return outcome
        for one in reversed(self.ring.since(self._begins.get(call, 0))):
            for left in lefts.values():
                if one.error is not None and positions.is_hopeless(one, left, self.told.rank):
                    told = self._aborted(one.op, f"{one.op} #{one.group_seq}", one.line, left)
                    self._because = self._because or told
                    return msgspec.structs.replace(outcome, error=self.shell.describe_error(told))
        return outcome

    # ---- commands

    def _run_cell(self, command: messages.RunCell) -> Outcome:
        run = self.shell.run(command)
        value = None
        if run.has_result and not command.silent:
            value = self._describe(command.call, run.result, command.inline_limit, keep=True)
        return Outcome(status=run.status, value=value, error=run.error, bound=run.bound, unbound=run.unbound)

    def _run_ops(self, command: messages.RunOps) -> Outcome:
        tensors = self.tensors
        tensors.expect(command)
        if command.stopped:
            tensors.give_up(command)
            return Outcome(status="ok")
        ran = self.shell.call(lambda: tensors.run(command))
        if ran.status != "ok":
            tensors.give_up(command)
            return Outcome(status=ran.status, error=ran.error)
        answer: dict[str, Any] = ran.result
        payload = answer.pop("value", None)
        value = None if payload is None else Value(preview=_NO_PREVIEW, payload=payload)
        return Outcome(status="ok", value=value, answer=answer or None)

    @property
    def tensors(self) -> Any:
        """What this rank holds for controllers' remote tensors."""
        if self._tensors is None:
            import torch

            from meshbook.rank.tensors.engine import Tensors

            self._tensors = Tensors(
                self.told.rank,
                torch.device(self.device),
                self._groups,
                load=self._load,
                dump=lambda thing: self._kept.dump(self.running or "", thing),
                resolve=self.resolve,
                hold=self._gate.held,
            )
        return self._tensors

    @property
    def under_way(self) -> Any:
        """The operation on remote tensors that runs now (`rank.tensors.engine.UnderWay`); None: none does."""
        return None if self._tensors is None else self._tensors.under_way()

    def _call_function(self, command: messages.CallFunction) -> Outcome:
        function, args, kwargs = self._load(command.function)
        self._lend_names(function)
        return self._call(command, lambda: function(*args, **kwargs))

    def _evaluate(self, command: messages.Evaluate) -> Outcome:
        path = self._load(command.path)
        return self._call(command, lambda: paths.evaluate(path, self.shell.user_ns, self._kept, self.resolve))

    def _call(self, command: messages.CallFunction | messages.Evaluate, act: Callable[[], Any]) -> Outcome:
        called = self.shell.call(act)
        if called.status != "ok":
            return Outcome(status=called.status, error=called.error)
        if command.keep_always:
            self._kept.keep(command.call, called.result)
        value = self._describe(command.call, called.result, command.inline_limit, keep=command.keep)
        if command.keep_always:
            value = msgspec.structs.replace(value, ref=command.call)
        return Outcome(status="ok", value=value)

    def _set_names(self, command: messages.SetNames) -> Outcome:
        values = self._load(command.payload)
        if command.per_rank:
            values = values[self.told.rank]
        for name, value in zip(command.names, values, strict=True):
            self.shell.user_ns[name] = value
        return Outcome(status="ok", bound=command.names)

    def _delete_names(self, command: messages.DeleteNames) -> Outcome:
        for name in command.names:
            self.shell.user_ns.pop(name, None)
        return Outcome(status="ok", unbound=command.names)

    def _form_groups_or_say_why_not(self, command: messages.FormGroups) -> Outcome:
        try:
            return self._form_groups(command)
        except Exception as error:
            lacking = limits.shortage_behind(error)
            if lacking is None:
                raise
            raise lacking from error

    def _form_groups(self, command: messages.FormGroups) -> Outcome:
        """The process groups of this epoch, and with the first of them the names that user code finds."""
        spec = self.told.spec
        if not spec.torch:
            self.shell.preset(rank=self.told.rank, local_rank=self.told.local_rank, world_size=self.told.world_size)
            return Outcome(status="ok", answer={"backend": None})
        import torch
        import torch.distributed as dist

        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        names: dict[str, Any] = {
            "rank": self.told.rank,
            "local_rank": self.told.local_rank,
            "world_size": self.told.world_size,
            "device": device,
            "torch": torch,
            "dist": dist,
        }
        backend = None
        if spec.process_group:
            from meshbook.rank.groups import Groups
            from meshbook.rank.store import MeshStore

            if self._groups is None:
                context = self._reporter.work.context
                self._store = MeshStore(context, command.store, self.told.token, timeout_s=_FORM_TIMEOUT_S)
                self._groups = Groups(self.ring, collective_timeout_s=spec.group_timeout_s)
                if probes.switched_on():
                    self._groups.observers.append(_Noting(self._words, self.shell))
            self._held_for = None  # nobody asks any more about calls of the groups before
            names["mesh"] = self._groups.form(
                command.epoch,
                rank=self.told.rank,
                world_size=self.told.world_size,
                store=self._store,
                device=device,
                timeout_s=_FORM_TIMEOUT_S,
                axes=spec.axes,
            )
            backend = dist.get_backend()
        if command.epoch == 1 or "rank" not in self.shell.user_ns:
            self.shell.preset(**names)
        return Outcome(status="ok", answer={"backend": backend})

    # ---- values

    def _describe(self, call: str, result: Any, inline_limit: int, *, keep: bool) -> Value:
        """A value as it is reported: its preview, itself if small, and a name to ask for it later if not.

        Plain values always come along; others only up to `inline_limit` bytes of pickle.
        """
        shown = self.shell.preview(result)
        if shown.kind in ("plain", "none") and not shown.truncated:
            inline_limit = max(inline_limit, _PLAIN_BYTES)
        payload = pickling.dump_small(result, inline_limit) if inline_limit else None
        if payload is not None:
            return Value(preview=shown, payload=payload)
        if not keep:
            return Value(preview=shown, payload=self._kept.dump(call, result))
        self._kept.keep(call, result)
        return Value(preview=shown, ref=call)

    def _lend_names(self, function: Any) -> None:
        """A function of the notebook, sent by value, knows only the globals that came with it; what it names beyond
        them (`rank`, `dist`, what cells have bound) it finds as if it had been defined in a cell."""
        known = getattr(function, "__globals__", None)
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if known is None or known is getattr(module, "__dict__", None):
            return
        for name in _names_in(function.__code__):
            if name not in known and name in self.shell.user_ns:
                known[name] = self.shell.user_ns[name]

    def _load(self, payload: messages.Payload) -> Any:
        return pickling.load(payload, reader=self.reader, resolve=self.resolve)

    def resolve(self, reference: str) -> Any:
        """The rank's own object for a handle among the arguments: `name:x`, `ref:<call>`, `tensor:<engine>#<id>`."""
        kind, _, key = reference.partition(":")
        if kind == "ref":
            if key not in self._kept:
                raise TransferError(f"the object behind this handle was released on rank {self.told.rank}")
            return self._kept[key]
        if kind == "tensor":
            return self.tensors.resolve(key)
        if kind in self.resolvers:
            return self.resolvers[kind](key)
        if key not in self.shell.user_ns:
            raise NameError(f"name {key!r} is not defined on rank {self.told.rank}")
        return self.shell.user_ns[key]

    # ---- called by the service thread

    def stop(self, call: CallId) -> None:
        """End this call, also if the main thread has not begun it yet; never the one after it."""
        self._gate.stop(call)

    def unblock(self, reason: str, *, interrupt: bool) -> None:
        """Free the main thread from a collective it waits in; on an interrupt only if it waits in one."""
        if self._groups is None or (interrupt and not self._groups.waiting):
            return
        self._groups.sever(KeyboardInterrupt(reason) if interrupt else RankLost(reason))

    def position(self, about: CallId) -> messages.RankPosition:
        """Where this rank is in the order of its collectives."""
        running, done, groups = self.running, self.done, self._groups
        last = self.ring.last
        since = self._begins.get(about, 0 if last is None else last.seq)  # not begun here: nothing moved for it
        return messages.RankPosition(
            rank=self.told.rank,
            call=None if done is None else done.call,
            status="" if done is None else done.outcome.status,
            cause=self._left_because,
            at_rest=running is None or groups is None or groups.is_held,
            idle=running is None,
            may_join=positions.may_join(self.ring),
            num_named=0 if groups is None else groups.num_named,
            groups=()
            if groups is None
            else positions.groups_now([group.label for group in groups.members()], self.ring, since),
        )

    def _why_it_left(self, outcome: Outcome) -> str:
        """Why others wait in vain for this rank: "rank 1 raised ValueError: no at line 3"; "" if it ended well."""
        error = outcome.error
        if outcome.status == "ok":
            return ""
        if error is not None and error.released is not None and self._because is not None:
            return self._because.cause  # it had left because of another one, which is the cause of all
        if outcome.status == "interrupted" or error is None:
            return f"rank {self.told.rank} was stopped"
        frame = next((frame for frame in reversed(error.frames) if is_user(frame.file)), None)
        where = "" if frame is None else f" at {_place(frame.file, frame.line, error.frames[0].file)}"
        text = error.evalue.splitlines()[0] if error.evalue else ""
        return f"rank {self.told.rank} raised {error.ename}{': ' if text else ''}{text}{where}"

    def hold_after(self, about: CallId) -> None:
        """A call is being stopped: once it is over here, collectives wait until it is over everywhere. What has begun
        behind it before is left alone."""
        if self._groups is None or self.running not in (None, about):
            return
        self._held_for = about
        if self.running is None:
            self._groups.hold()

    def complete_futures(self) -> None:
        """Of collectives that have ended unnoticed."""
        if self._groups is not None:
            self._groups.complete_futures()

    def groups_checked(self, command: messages.GroupsChecked) -> None:
        """The call that was asked about is over everywhere, and these groups are out of step."""
        if self._groups is None:
            return
        self._groups.break_named(command.broken, command.reason, epoch=command.epoch)
        if self._held_for == command.about:
            # Its host may have taken it back before it came here, and tell of it by its name: then it holds nothing.
            self._held_for = None
            self._groups.go_on()

    def ranks_left(self, command: messages.RanksLeft) -> None:
        """Others have left a call that this rank works on, or will."""
        known = _remember(self._left, command.call, self._left.get(command.call, {}))
        known.update({left.rank: left for left in command.left})
        if self.running == command.call:
            self._watch_left()

    def _watch_left(self) -> None:
        if not self._watching and self._groups is not None:
            self._watching = True
            threading.Thread(target=self._release_waits, name="meshbook-left", daemon=True).start()

    def _release_waits(self) -> None:
        """While the call runs that others have left: break the groups as soon as a collective waits for one of them."""
        pause = threading.Event()
        try:
            while (call := self.running) is not None and call in self._left and self._groups.severed_with is None:
                found = self._hopeless(tuple(self._left[call].values()))
                if found is not None and self.running == call:
                    self._because = found
                    self._groups.sever(found, epoch=self._groups.epoch)
                    return
                pause.wait(_LEFT_LOOK_S)
        finally:
            self._watching = False

    def _hopeless(self, lefts: tuple[messages.RankPosition, ...]) -> CollectiveAborted | None:
        """The error for whoever waits here in what needs a rank that has left; None: nobody does."""
        for one in self.ring.running():
            for left in lefts:
                if positions.is_hopeless(one, left, self.told.rank):
                    return self._aborted(one.op, f"{one.op} #{one.group_seq}", one.line, left)
        for label in self._groups.joining:
            for left in lefts:
                if positions.is_hopeless_to_join(label, left):
                    return self._aborted("new_group", "new_group", None, left)
        return None

    def _aborted(self, op: str, what: str, line: UserLine | None, left: messages.RankPosition) -> CollectiveAborted:
        where = op if line is None else f"{op} at {_place(line.file, line.line, self.shell.running_file)}"
        ended = f"rank {left.rank} ended the cell without coming to"
        told = left.cause or f"{ended} it"
        cause = left.cause or f"{ended} {what}"  # for those who wait for this rank in turn
        return CollectiveAborted(f"{what} cannot be completed: {told}", ranks=(left.rank,), cause=cause, where=where)

    def release(self, refs: tuple[str, ...], segments: tuple[str, ...]) -> None:
        self._kept.release(refs, segments)

    def drop_client(self, client: str) -> None:
        """Let go of what was held for a client that is gone."""
        self._kept.drop_client(client)
        if self._tensors is not None:
            self._tensors.drop(client)

    # ---- asking the user

    def ask(self, prompt: str, password: bool) -> str:
        """What the user answers in the notebook; input() and getpass() come here.

        Raises:
            EOFError: there is nobody to ask.
            KeyboardInterrupt: the user pressed Stop instead.
        """
        work = self._reporter.work
        call = self.running
        if call is None or not self.shell.allow_input:
            raise EOFError(
                "input() can be answered only while a cell of a notebook or terminal runs; "
                "give the value as a variable instead"
            )
        self._output.drain()
        self._reporter.say(work)
        self.asking = True  # before anybody hears of it
        try:
            self._reporter.send(messages.RankAsked(rank=self.told.rank, call=call, prompt=prompt, password=password))
            while True:
                work.poll()  # a SIGINT raises here, with no message half taken
                reply = codec.rank_commands.decode(work.recv_multipart())
                if isinstance(reply, messages.ReplyInput) and reply.target == call:
                    if reply.interrupted:
                        raise KeyboardInterrupt
                    if reply.text is None:
                        raise EOFError("there is nobody to ask for input() here")
                    return reply.text
        finally:
            self.asking = False

    # ---- begin and end

    def choose_device(self) -> str:
        """`cuda:<local rank>` when there is a GPU for every rank of this host, else `cpu`."""
        spec = self.told.spec
        if spec.torch and spec.device != "cpu":
            import torch

            num_gpus = torch.cuda.device_count()
            if spec.device == "cuda" and not num_gpus:
                raise StartError("cuda was asked for, and this host has no GPU that torch can use; try --device cpu")
            if num_gpus >= self.told.local_world_size or spec.device == "cuda":
                self.device = f"cuda:{self.told.local_rank % max(1, num_gpus)}"
        return self.device

    def close(self) -> None:
        """Leave the process groups without waiting for the others."""
        if self._groups is not None and "torch" in sys.modules:
            self._groups.close()
        self.pool.close()


def _place(file: str, line: int, own: str | None) -> str:
    """`line 3` of the cell that runs, `line 3 of cell 2` of another one, `train.py:3`."""
    if file == own:
        return f"line {line}"
    cell = cell_of(file)
    return f"line {line} of {cell}" if cell is not None else f"{os.path.basename(file)}:{line}"


def _remember(memory: dict[CallId, Any], call: CallId, what: Any) -> Any:
    """Keep something for a call, and for some calls before it."""
    memory[call] = what
    while len(memory) > _CALLS:
        del memory[next(iter(memory))]
    return what


class _Noting:
    """Notes each collective where the host finds it should this process die in it; about 2 us."""

    def __init__(self, words: LastWords, shell: RankShell) -> None:
        self._words, self._shell = words, shell

    def begun(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        line = collective.line
        where = ""
        if line is not None:
            place = "the cell" if line.file == self._shell.running_file else line.file
            where = f", at line {line.line} of {place}"
        self._words.note(f"{collective.op} #{collective.group_seq} of {collective.label.members}{where}")

    def finished(self, collective: Collective, arguments: tuple[Any, ...]) -> None:
        pass


def _names_in(code: CodeType) -> Iterator[str]:
    """Global names that a function uses, also in functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
