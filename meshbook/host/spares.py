"""A host's spares: processes that have imported what its ranks have, and wait to become one.

A rank that starts takes a spare that is ready, if there is one, which is then a rank like any other. If the spare does
not answer, or is unfit, the rank is started without it. A spare that ends is replaced, later each time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from meshbook.errors import describe_exit
from meshbook.host.starter import RankProcess, Starter
from meshbook.wire import descriptors, messages, spawn
from meshbook.wire.loop import Loop, Timer
from meshbook.wire.process_control import is_stopped, kill_process_group

log = logging.getLogger("meshbook.host")

# Seconds in which a spare has to say that it is the rank; it looks at some thousand files before. One that is stopped
# then is not waited for any longer; one that is slow, on a busy machine, is: a new process would take longer.
_ANSWER_S, _SLOW_ANSWER_S = 1.0, 10.0
# ... until a spare that has ended is replaced: doubled each time, up to the second.
_REPLACE_S, _REPLACE_MAX_S = 0.5, 60.0


@dataclass(eq=False)
class _Spare:
    """One spare, and this end of its socket."""

    channel: socket.socket
    process: RankProcess | None = None
    num_sent: int = 0  # how many of the host's modules it has been sent
    importing: str = ""  # the package that it imports now
    report: spawn.SpareReady | None = None  # the last one
    is_ready: bool = False  # it has imported all that it was sent
    on_taken: Callable[[bool], None] | None = None  # it has been sent what rank to become; called with whether it is
    timer: Timer | None = None


@dataclass
class _Ended:
    """How the last spare ended that nobody had asked to."""

    pid: int
    text: str = "has ended"


class SparePool:
    """The spares of one host."""

    def __init__(self, loop: Loop, starter_for: Callable[[spawn.SpareConfig], Starter], host: int) -> None:
        """starter_for: returns what starts processes of this configuration."""
        self._loop, self._starter_for, self._host = loop, starter_for, host
        self._spares: list[_Spare] = []
        self._modules: dict[str, None] = {}  # that ranks have imported, in order
        self._left_out: dict[str, str] = {}  # packages that spares do not import, and why
        self._config: spawn.SpareConfig | None = None
        self._num = 0  # that there are to be
        self._num_ended = 0  # since they were asked for
        self._ended: _Ended | None = None
        self._refill: Timer | None = None
        self._is_closed = False

    # ---- what there is to be

    def keep(self, num: int, config: spawn.SpareConfig) -> None:
        """Have so many spares, from now on."""
        if not num:
            self._left_out.clear()
            self._ended = None
        self._num, self._config, self._num_ended = num, config, 0
        for spare in sorted(self._idle(), key=lambda spare: spare.is_ready)[: max(0, len(self._idle()) - num)]:
            self._end(spare)
        self._fill()

    def learn(self, modules: tuple[str, ...]) -> None:
        """A rank has imported these; spares do so too."""
        num_before = len(self._modules)
        self._modules.update(dict.fromkeys(modules))
        if len(self._modules) > num_before:
            for spare in self._idle():
                if spare.is_ready:
                    self._send_modules(spare)

    def take(
        self,
        config: spawn.RankConfig,
        on_started: Callable[[int, RankProcess], None],
        otherwise: Callable[[spawn.RankConfig], None],
    ) -> bool:
        """Have a spare become this rank. Return False if none is ready; nothing is called then.

        Args:
            on_started: called with the rank and its process, which is no spare any more.
            otherwise: called with the configuration if the spare is not that rank; the rank is to be started then.
        """
        spare = next((spare for spare in self._idle() if spare.is_ready and spare.process is not None), None)
        if spare is None or (self._config is not None and config.spec.torch != self._config.spec.torch):
            return False
        self._num -= 1  # until they are asked for again: its imports would hold up the ranks that start now

        def taken(is_rank: bool) -> None:
            if is_rank and spare.process is not None:
                self._remove(spare)
                on_started(config.rank, spare.process)
            else:
                self._end(spare)
                otherwise(config)

        spare.is_ready = False
        try:
            spawn.send_in_file(spare.channel, spawn.BecomeRank(config))
        except OSError:  # it has ended
            self._end(spare)
            return False
        spare.on_taken = taken
        spare.timer = self._loop.call_later(_ANSWER_S, lambda: self._unanswered(spare, _ANSWER_S))
        return True

    def infos(self) -> tuple[messages.SpareInfo, ...]:
        found = []
        hostname, left_out = socket.gethostname(), tuple(self._left_out.items())
        for spare in self._idle():
            report = spare.report or spawn.SpareReady(0, 0.0, 0)
            started = messages.SpareInfo(
                host=self._host,
                hostname=hostname,
                pid=spare.process.pid if spare.process is not None else None,
                state="ready" if spare.is_ready else "importing" if spare.process is not None else "starting",
                num_modules=report.num_modules,
                import_s=report.seconds,
                private_bytes=report.private_bytes,
                left_out=(*left_out, *report.failed),
                former=self._ended.text if self._ended is not None else "",
            )
            found.append(started)
        for _ in range(self._num - len(found)):  # those that are made anew in a while
            ended = self._ended.text if self._ended is not None else ""
            found.append(messages.SpareInfo(self._host, hostname, None, "starting", left_out=left_out, former=ended))
        return tuple(found)

    def take_over(self) -> None:
        """Go on in a process that was forked from the host's, which has ended: make all anew."""
        for spare in list(self._spares):
            if spare.process is None:  # its socket was the other process's, and is closed here
                spare.channel.detach()
            if spare.on_taken is not None:
                spare.on_taken(False)
            else:
                self._end(spare)
        self._fill()

    def close(self) -> None:
        """End all, and make no more. May be called again."""
        self._is_closed, self._num = True, 0
        if self._refill is not None:
            self._refill.cancel()
        for spare in list(self._spares):
            self._end(spare)

    # ---- what happens to processes

    def process_exited(self, pid: int, status: int | None) -> bool:
        """A process has ended; `status` as returned by waitpid, None: not known. Return whether it was a spare."""
        for spare in self._spares:
            if spare.process is not None and spare.process.pid == pid:
                self._read(spare)  # all that it has sent, and its end
        if self._ended is None or self._ended.pid != pid:
            return False
        if status is None:
            return True
        is_killed = os.WIFSIGNALED(status)
        number, code = (os.WTERMSIG(status), None) if is_killed else (None, os.WEXITSTATUS(status))
        self._ended.text = describe_exit(number, code)
        return True

    def fork_server_exited(self) -> None:
        """Replace what was forked from it: how those end would not be known."""
        for spare in list(self._spares):
            if spare.process is not None:
                self._lost(spare, "was ended with its fork server")

    # ---- within

    def _idle(self) -> list[_Spare]:
        """Return those that no rank has taken."""
        return [spare for spare in self._spares if spare.on_taken is None]

    def _fill(self) -> None:
        while not self._is_closed and self._config is not None and len(self._idle()) < self._num:
            self._loop.diverge()
            if not self._start(self._config):
                self._fill_later()
                return

    def _start(self, config: spawn.SpareConfig) -> bool:
        """Have a process started; return False if there is no descriptor for it."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._ended = _Ended(-1, f"could not be started: {descriptors.describe(error)}")
            return False
        ours.setblocking(False)
        spare = _Spare(ours)
        self._spares.append(spare)

        def started(process: RankProcess) -> None:
            if spare not in self._spares:  # it is not wanted any more, and reads the end of its socket
                process.close()
                return
            spare.process = process
            self._loop.watch_fd(ours.fileno(), lambda: self._read(spare))
            self._send_modules(spare)

        def failed(reason: str) -> None:
            if spare in self._spares:
                self._lost(spare, f"could not be started: {reason}")

        config = msgspec.structs.replace(config, left_out=tuple(self._left_out))
        try:
            self._starter_for(config).start_spare(config, theirs, started, failed)
        except OSError as error:
            theirs.close()
            self._remove(spare)
            self._ended = _Ended(-1, f"could not be started: {descriptors.describe(error)}")
            return False
        return True

    def _send_modules(self, spare: _Spare) -> None:
        names = list(self._modules)[spare.num_sent :]
        spare.num_sent, spare.is_ready = len(self._modules), False

        def send() -> None:
            with contextlib.suppress(OSError):  # it has ended, which its socket says too
                spawn.send_in_file(spare.channel, spawn.ImportModules(tuple(names)))

        self._loop.act(send)

    def _read(self, spare: _Spare) -> None:
        while spare in self._spares:
            try:
                data = spare.channel.recv(spawn.RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost(spare, "has ended")
                return
            match spawn.spare_reports.decode(data):
                case spawn.SpareImporting(package=package):
                    spare.importing = package
                case spawn.SpareReady() as report:
                    spare.importing, spare.report, spare.is_ready = "", report, spare.on_taken is None
                    if spare.is_ready and spare.num_sent < len(self._modules):
                        self._send_modules(spare)
                case spawn.SpareUnfit(reason=reason, packages=packages):
                    log.info("a spare is replaced: %s %s", reason, dict(packages))
                    self._left_out.update(packages)
                    if spare.on_taken is not None:
                        spare.on_taken(False)
                    else:
                        self._end(spare)
                        self._fill()
                case spawn.SpareAccepted() if spare.on_taken is not None:
                    spare.on_taken(True)

    def _unanswered(self, spare: _Spare, waited_s: float) -> None:
        if spare not in self._spares or spare.on_taken is None or spare.process is None:
            return
        pid = spare.process.pid
        if waited_s < _SLOW_ANSWER_S and not self._loop.observe(lambda: is_stopped(pid)):
            waited_s += _ANSWER_S
            spare.timer = self._loop.call_later(_ANSWER_S, lambda: self._unanswered(spare, waited_s))
            return
        log.warning("a spare did not answer within %.0f s, and is ended", waited_s)
        spare.on_taken(False)

    def _lost(self, spare: _Spare, text: str) -> None:
        """A spare has ended, or is ended because it is of no use."""
        if spare.on_taken is not None:
            spare.on_taken(False)
            return
        self._ended = _Ended(spare.process.pid if spare.process is not None else -1, text)
        if spare.importing:
            self._left_out[spare.importing] = "the process ended while it was imported"
        log.warning("a spare %s%s", text, f", while it imported {spare.importing}" if spare.importing else "")
        self._end(spare)
        self._fill_later()

    def _fill_later(self) -> None:
        self._num_ended += 1
        delay_s = min(_REPLACE_S * 2 ** (self._num_ended - 1), _REPLACE_MAX_S)
        if self._refill is not None:
            self._refill.cancel()
        self._refill = self._loop.call_later(delay_s, self._fill)

    def _end(self, spare: _Spare) -> None:
        self._remove(spare)
        if spare.process is not None:
            self._loop.act(functools.partial(_kill, spare.process.pid))
            spare.process.close()

    def _remove(self, spare: _Spare) -> None:
        """Forget a spare, and close this end of its socket."""
        if spare not in self._spares:
            return
        self._spares.remove(spare)
        if spare.timer is not None:
            spare.timer.cancel()
        if spare.process is not None:
            self._loop.unwatch(spare.channel.fileno())
        spare.channel.close()


def _kill(pid: int) -> None:
    kill_process_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
