"""The loop of a campaign: a mesh that works, a fault at a random moment, and what must be so afterwards.

One mesh of each kind is used for case after case, healed where a rank was lost, until a fault ends it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

import meshbook.actor
from meshbook.controller.healed import Healed
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, HealError, MeshbookError, RankLost
from meshbook.wire import processes
from tests.budget import when
from tests.campaign import checks, work
from tests.campaign.checks import Problem
from tests.campaign.draws import WORLD_SIZE, Draw
from tests.campaign.faults import FAULTS
from tests.campaign.kernels import run_kernel_case
from tests.campaign.report import Result
from tests.campaign.scene import Scene, fork_server_of
from tests.campaign.surroundings import Surroundings
from tests.campaign.work import WORKS
from tests.host_processes import agents_among
from tests.random_faults.harness import ProgramHung, WrongResult, deadline, end_supervisor, stacks

# Seconds after which a work that was hit counts as hung; and the same for healing and for verifying.
HANG_S = 60.0
# Seconds that a work may go on after a shortage of memory, before it is stopped as a person would stop it: CPython's
# `Thread.start` waits for ever for a thread that had no memory to begin, without Meshbook too.
STOP_AFTER_S = 15.0


class Meshes:
    """One mesh of each kind, made when it is first wanted."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._meshes: dict[str, Mesh] = {}

    def get(self, kind: str) -> Mesh:
        if kind not in self._meshes:
            mesh = create_mesh({"dp": WORLD_SIZE}, num_hosts=2 if kind == "hosts" else 1)
            self._meshes[kind] = mesh
            set_up(mesh, self._surroundings)
        return self._meshes[kind]

    def discard(self, kind: str, *, hard: bool = False) -> None:
        """End a mesh; `hard`: without asking it, because it may not answer."""
        mesh = self._meshes.pop(kind, None)
        if mesh is None:
            return
        if hard:
            end_supervisor(mesh)
        try:
            with deadline(lambda: mesh, HANG_S):
                mesh.stop()
        except (Exception, ProgramHung):
            end_supervisor(mesh)

    def close(self) -> None:
        for kind in list(self._meshes):
            self.discard(kind)


def set_up(mesh: Mesh, surroundings: Surroundings) -> None:
    """Run the setup cell on a new mesh."""
    folder = surroundings.folder / mesh.name
    folder.mkdir(exist_ok=True)
    mesh.run(work.SETUP.format(folder=str(folder)), setup=True, echo=False)


class Campaign:
    """Runs cases one by one."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        self.meshes = Meshes(surroundings)

    def run(self, draw: Draw) -> Result:
        """Run one case. Never raises for what a mesh does wrong: that is in the result."""
        began = time.monotonic()
        result = Result(draw)
        kind = FAULTS[draw.fault].mesh
        folder = self.surroundings.folder / str(draw.number)
        folder.mkdir()
        case: Case | None = None
        try:
            if kind == "kernel":
                with deadline(lambda: None, 3 * HANG_S):
                    run_kernel_case(draw, result, self.surroundings, folder)
                return self._finish(result, began)
            with deadline(lambda: case.scene.mesh if case else None, HANG_S):
                mesh = self.meshes.get(kind)
            scene = Scene(
                draw.number, draw.case_seed, draw.victim, random.Random(f"fault {draw.case_seed}"), mesh,
                self.surroundings, folder,
            )  # fmt: skip
            case = Case(draw, scene, result)
            case.run()
        except ProgramHung as hung:
            result.problems.append(Problem("hang", str(hung)))
        except Exception as error:
            where = f"\n{stacks(case.scene.mesh)}" if isinstance(error, WrongResult) and case else ""
            result.problems.append(Problem("lost state", f"{type(error).__name__}: {error}{where}"))
        if result.problems or case is None or case.is_mesh_over:
            self.meshes.discard(kind, hard=any(problem.kind == "hang" for problem in result.problems))
        if case is not None and case.is_mesh_over and not result.problems:
            result.problems += checks.check_leaks(self.surroundings.run, case.before_mesh(), (), case.own_pids)
        return self._finish(result, began)

    def _finish(self, result: Result, began: float) -> Result:
        self.surroundings.clear()
        result.seconds = time.monotonic() - began
        return result


class Case:
    """One fault in one work on a mesh that exists.

    Attributes:
        is_mesh_over: whether the mesh is to be given up.
        own_pids: the processes of the mesh, as they were before the fault.
    """

    def __init__(self, draw: Draw, scene: Scene, result: Result) -> None:
        self.draw, self.scene, self.result = draw, scene, result
        self.fault, self.work = FAULTS[draw.fault], WORKS[draw.work]
        self.mesh = scene.mesh
        self.is_mesh_over = False
        self.own_pids: frozenset[int] = frozenset()
        self._own_servers: set[int] = set()  # fork servers
        self._resize_servers: set[int] = set()
        self._own_supervisor: set[int] = set()
        self._own_agents: set[int] = set()  # of hosts that are processes of their own
        self._before: checks.Remains
        self._exits: dict[int, Any] = {}
        self._exit_times: list[float] = []
        self._second_pid: int | None = None
        self._done_at = 0.0  # when the fault began
        self._fault_error: BaseException | None = None
        self._is_work_over = threading.Event()
        self._is_stopped = False  # the work did not end, and was stopped

    def before_mesh(self) -> checks.Remains:
        """What there was before the case, without the mesh itself."""
        processes = {pid: line for pid, line in self._before.processes.items() if pid not in self.own_pids}
        return checks.Remains(processes, self._before.places, self._before.descriptors)

    def run(self) -> None:
        """Raises WrongResult, ProgramHung, and what the mesh raises where it must not."""
        with deadline(lambda: self.mesh, HANG_S):
            checks.hold(self.mesh, self.scene.seed)
            expected_lost = self._expected_lost()
        run = self.scene.surroundings.run
        self._before = checks.look_round(run)
        self.own_pids, self._own_servers = self._mesh_pids(), self._fork_servers()
        self._own_supervisor = {self.mesh.session.info.supervisor_pid}
        self._own_agents = agents_among(self._before.processes)
        with deadline(lambda: self.mesh, HANG_S):
            error = self._work_with_fault()
        if self._fault_error is not None:
            raise WrongResult(f"the fault was not done: {self._fault_error!r}") from self._fault_error
        self.result.problems += self._check_blame(error, expected_lost)
        with deadline(lambda: self.mesh, HANG_S):
            self._go_on(expected_lost)
        self.scene.surroundings.clear()
        if self.result.problems or self.is_mesh_over:
            return
        new = {info.pid for info in self.mesh.status().ranks if info.rank in self._exits and info.pid}
        gone = {exited.pid for exited in self._exits.values()}
        if self._second_pid is not None:
            new |= self._rank_pids() - self.own_pids
            gone |= {self._second_pid} & self.own_pids
        new |= (self._fork_servers() | self._resize_servers) - self._own_servers
        gone |= {pid for pid in self._own_servers if not processes.is_running(processes.identify(pid))}
        if self.fault.lost == "host":
            new, gone = self._mesh_pids() - self.own_pids, self.own_pids - self._mesh_pids()
        elif self.fault.name == "supervisor killed":
            new, gone = {self.mesh.session.info.supervisor_pid}, self._own_supervisor
        elif self.fault.name == "host agent killed":
            agents = agents_among(checks.look_round(run).processes)
            new, gone = new | agents - self._own_agents, gone | self._own_agents - agents
        self.result.problems += checks.check_leaks(run, self._before, new, gone)

    def _expected_lost(self) -> tuple[int, ...]:
        match self.fault.lost:
            case "victim":
                return (self.draw.victim,)
            case "host":
                return self.scene.host_ranks()[1]
            case "mesh":
                return self.mesh.ranks
        return ()

    def _mesh_pids(self) -> frozenset[int]:
        """The supervisor, the ranks, and what has started them."""
        info = self.mesh.status()
        pids = {info.supervisor_pid}
        with suppress(psutil.Error):
            pids |= {child.pid for child in psutil.Process(info.supervisor_pid).children(recursive=True)}
        return frozenset(pids | self._rank_pids() | self._fork_servers())

    def _rank_pids(self) -> set[int]:
        ranks = self.mesh.status().ranks
        return {rank.pid for rank in ranks if rank.pid is not None and rank.state != "dead"}

    def _fork_servers(self) -> set[int]:
        """The fork servers that living ranks were forked from."""
        found = set[int]()
        for pid in self._rank_pids():
            with suppress(psutil.Error):
                if (server := fork_server_of(pid)) is not None:
                    found.add(server)
        return found

    # ---- the fault

    def _work_with_fault(self) -> BaseException | None:
        """Run the work with the fault in it; return what the mesh has raised, None: it came to its end."""
        listeners = self.mesh.session.lost_listeners
        hook = meshbook.actor.unhandled_fault_hook
        meshbook.actor.unhandled_fault_hook = lambda failure: None  # type: ignore[assignment]
        listeners.append(self._note_exits)
        thread = threading.Thread(target=self._do_fault, name="fault", daemon=True)
        thread.start()
        first: BaseException | None = None
        try:
            while True:
                error = self._run_work()
                if first is None and error is not None:
                    first = error
                    self._note_end()
                is_lost = self.mesh.session.lost or self.mesh.session.ended is not None
                if error is None or is_lost or self.result.problems:
                    break
                self.result.problems += self._check_blame(error, ())
        finally:
            self.scene.end_work()
            self._is_work_over.set()
            thread.join(HANG_S)
            listeners.remove(self._note_exits)
            meshbook.actor.unhandled_fault_hook = hook
        self._note_end()
        return first

    def _check_blame(self, error: BaseException | None, lost: tuple[int, ...]) -> list[Problem]:
        if self._is_stopped and error is not None and checks.says(error, ("KeyboardInterrupt",)):
            return []
        return checks.check_blame(self.draw, error, lost)

    def _run_work(self) -> BaseException | None:
        try:
            self.work.run(self.scene)
        except WrongResult:
            raise
        except (MeshbookError, meshbook.actor.ActorError, meshbook.actor.SupervisionError) as error:
            return error
        return None

    def _do_fault(self) -> None:
        try:
            self.scene.wait_begun()
            time.sleep(self.draw.delay_s)  # the fault's moment, which is drawn
            self._done_at = time.monotonic()
            self.fault.do(self.scene)
        except BaseException as error:
            self._fault_error = error
        if self.work.heals and self.fault.lost in ("victim", "host") and self._fault_error is None:
            when(lambda: self._exits or self._is_work_over.is_set())
            if self.draw.second is not None:
                self._kill_second(*self.draw.second)
                self._wait_for_second()
            self.scene.end_work()
        if not self.fault.lost or self.fault.lost == "perhaps" or self._fault_error is not None:
            self.scene.end_work()
        if self.fault.takes == "memory" and not self._is_work_over.wait(STOP_AFTER_S):
            self._is_stopped = True
            self.mesh.interrupt()

    def _note_exits(self, exited: tuple[Any, ...]) -> None:
        self._exit_times.append(time.monotonic())
        for one in exited:
            self._exits.setdefault(one.rank, one)

    def _note_end(self) -> None:
        if self.result.unblocked_s is None and self._done_at:
            self.result.unblocked_s = time.monotonic() - self._done_at
            if self._exit_times:
                self.result.named_s = min(self._exit_times) - self._done_at

    # ---- afterwards

    def _go_on(self, expected_lost: tuple[int, ...]) -> None:
        """Heal what was lost, and see that everything is there and computes what it must."""
        if self.fault.lost == "mesh":
            self._expect_refused(lambda: self.mesh.run("1", echo=False), "supervisor")
            self.is_mesh_over, self.result.outcome = True, "mesh ended, and said so"
            return
        wanted = set(expected_lost) or (
            set(self._exits) & {self.draw.victim} if self.fault.lost == "perhaps" else set()
        )
        lost = set(self._exits if self.work.heals else self.mesh.session.lost)
        if not wanted <= lost or lost - wanted - ({self.draw.second[0]} if self.draw.second else set()):
            raise WrongResult(f"ranks {sorted(wanted)} were to be lost, and {sorted(lost)} are")
        self.result.problems += checks.check_exit(self.draw, {rank: self._exits[rank] for rank in wanted})
        healed = self.scene.heals if self.work.heals else self._heal() if wanted else []
        self.result.problems += checks.check_state(self.mesh, self.scene.seed, healed)
        self._verify()
        if self.draw.resizes:
            self._resize_and_back(healed)
        self.result.outcome = "healed" if healed else "went on"

    def _heal(self) -> list[Healed]:
        """Heal until all ranks live, whoever dies meanwhile; return what came of each heal, in order."""
        began = time.monotonic()
        killer = None
        if self.draw.second is not None:
            killer = threading.Thread(target=self._kill_second, args=self.draw.second, name="second death")
            killer.start()
        found: list[Healed] = []
        while True:
            try:
                found.append(self.mesh.heal())
            except HealError:
                if killer is None:
                    raise
            if killer is not None:
                killer.join()
                killer = None
                self._wait_for_second()
            elif found and not self.mesh.session.lost:
                break
        self.result.healed_s = time.monotonic() - began
        if not set(self._exits) <= {rank for healed in found for rank in healed.ranks}:
            raise WrongResult(f"ranks {sorted(self._exits)} were to be healed: {found}")
        return found

    def _kill_second(self, rank: int, delay_s: float) -> None:
        time.sleep(delay_s)  # a moment of the heal, which is drawn
        pid = self.mesh.status().ranks[rank].pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._second_pid = pid

    def _wait_for_second(self) -> None:
        """Wait until the mesh knows of the second death, if there was one."""
        pid = self._second_pid
        if pid is not None:
            when(lambda: all(info.pid != pid or info.state == "dead" for info in self.mesh.status().ranks))

    def _resize_and_back(self, healed: list[Healed]) -> None:
        """A mesh with one rank more, and then as before, has what it had."""
        for size in (WORLD_SIZE + 1, WORLD_SIZE):
            self.mesh.resize(dp=size)
            WORKS["collectives"].verify(self.scene)
            self._resize_servers |= self._fork_servers()  # one may have been started for the rank that leaves
        self.result.problems += checks.check_state(self.mesh, self.scene.seed, healed)

    def _verify(self) -> None:
        """The work itself, and collectives, on the whole mesh.

        Connections that were lost while nothing used them are noticed by the next collective, which may fail once.
        """
        steps: list[Callable[[Scene], None]] = [self.work.verify, WORKS["collectives"].verify]
        may_fail = self.fault.takes == "connections"
        for step in steps:
            try:
                step(self.scene)
            except (CellError, RankLost) as error:
                if not may_fail or isinstance(error, RankLost) or not checks.says(error, self.fault.said):
                    raise WrongResult(f"after the fault: {type(error).__name__}: {error}") from error
                may_fail = False
                step(self.scene)

    def _expect_refused(self, ask: Callable[[], object], word: str) -> None:
        try:
            ask()
        except (HealError, MeshbookError) as error:
            if word not in str(error):
                self.result.problems.append(Problem("wrong blame", f"{word!r} is not named: {error}"))
            return
        raise WrongResult(f"the mesh went on as if its {word} had not ended")
