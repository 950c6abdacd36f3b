"""`meshbook top`, driven by its keys, on a mesh that is not there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from meshbook.controller.subscription import MeshSnapshot
from meshbook.dashboard.terminal import Confirm, TopApp
from meshbook.errors import NotAttached
from tests.budget import WAIT_S
from tests.dashboard.pictures import Training


@dataclass
class PretendMesh:
    """Notes what is done to it."""

    ranks: tuple[int, ...]
    done: list[tuple[Any, ...]] = field(default_factory=list)

    def stacks(self, ranks: tuple[int, ...]) -> Any:
        self.done.append(("stacks", ranks))
        return SimpleNamespace(text="[bold]not markup[/bold]")

    def why(self) -> Any:
        raise NotAttached("the mesh is no more")

    def interrupt(self, ranks: tuple[int, ...]) -> None:
        self.done.append(("interrupt", ranks))

    def kill(self, ranks: tuple[int, ...]) -> None:
        self.done.append(("kill", ranks))

    def logs(self, rank: int, limit_bytes: int) -> str:
        return f"\x1b[31mlast words of {rank}\x1b[0m"


@dataclass
class PretendOnlooker:
    snapshot: MeshSnapshot


def drive(training: Training, act: Callable[[Pilot[None], TopApp, PretendMesh], Any]) -> None:
    async def run() -> None:
        mesh = PretendMesh(tuple(range(training.size)))
        app = TopApp(mesh, PretendOnlooker(training.picture))  # type: ignore[arg-type]
        async with app.run_test(size=(120, 40)) as pilot:
            await act(pilot, app, mesh)

    asyncio.run(asyncio.wait_for(run(), 60))


async def says(pilot: Pilot[None], app: TopApp, text: str) -> None:
    """Wait until it is shown below the ranks."""

    async def shown() -> None:
        while text not in str(app.query_one("#said", Static).content):
            await pilot.pause(0.01)

    await asyncio.wait_for(shown(), WAIT_S)


def test_a_hang_is_seen_and_its_ranks_are_interrupted_and_killed_after_a_question() -> None:
    training = Training({"rank": 4}, stuck=2, stuck_after=1)
    training.step()
    training.step()

    async def act(pilot: Pilot[None], app: TopApp, mesh: PretendMesh) -> None:
        assert "3 waiting" in str(app.query_one("#head", Static).content)
        assert "Rank 2 sleeps" in str(app.query_one("#findings", Static).content)
        table: DataTable[Any] = app.query_one("#ranks", DataTable)
        waits = [str(table.get_row_at(at)[3]) for at in range(4)]
        assert waits == ["all_reduce #61", "all_reduce #61", "", "all_reduce #61"]
        await pilot.press("s")
        await says(pilot, app, "[bold]not markup")
        await pilot.press("w")
        await says(pilot, app, "the mesh is no more")
        await pilot.press("i")
        await says(pilot, app, "ranks 0-3 interrupted")
        await pilot.press("k")
        await says(pilot, app, "choose a row first")
        await pilot.press("down", "down", "enter", "k")
        assert isinstance(app.screen, Confirm)
        await pilot.press("escape", "l")
        await says(pilot, app, "last words of 2")
        await pilot.press("k", "y")
        await says(pilot, app, "rank 2 killed")
        assert mesh.done == [("stacks", (0, 1, 2, 3)), ("interrupt", (0, 1, 2, 3)), ("kill", (2,))]
        await pilot.press("q")

    drive(training, act)


def test_a_thousand_ranks_are_a_few_rows() -> None:
    training = Training({"dp": 32, "tp": 32}, stuck=700, stuck_after=1)
    training.step()
    training.step()

    async def act(pilot: Pilot[None], app: TopApp, mesh: PretendMesh) -> None:
        table: DataTable[Any] = app.query_one("#ranks", DataTable)
        assert [str(table.get_row_at(at)[0]) for at in range(table.row_count)] == ["0-699,701-1023", "700"]
        await pilot.press("down", "enter", "s")
        await says(pilot, app, "not markup")
        assert mesh.done == [("stacks", (700,))]

    drive(training, act)
