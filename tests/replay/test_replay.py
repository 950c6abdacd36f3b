"""Failures on a mesh of four ranks, and the same failures in one process: the same error, at the same line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from meshbook.actor import Actor, ActorError, current_rank, endpoint
from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.errors import CellError, UsageError
from meshbook.rank.recording import bundle
from meshbook.rank.recording.bundle import BundleError, BundleFile
from meshbook.replay.cell import differ_in_digits
from meshbook.replay.command import ReplayOptions, run
from tests.budget import WAIT_S, when
from tests.cli.commands import meshbook
from tests.replay.planted import PLANTED, Planted
from tests.replay.replayer import Replayer

pytestmark = pytest.mark.usefixtures("starts_meshes")

SECRET = "hunter2-of-the-cloud"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOUD_TOKEN", SECRET)
        with create_mesh(4) as mesh:
            yield mesh


@pytest.fixture(scope="module")
def replayer() -> Iterator[Replayer]:
    with Replayer() as replayer:
        yield replayer


@pytest.fixture(scope="module")
def failure(mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a failed cell's bundle, of rank 2."""
    folder = tmp_path_factory.mktemp("failure")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        raised = fail(mesh, PLANTED[0])
    note = raised.__notes__[-1]
    assert note.startswith("bundle failures/f1 (")
    assert note.endswith("meshbook replay failures/f1 --rank 2")
    return folder / "failures" / "f1"


def fail(mesh: Mesh, planted: Planted) -> CellError:
    """Run the cells of a planted failure, and record the last."""
    for source in planted.before:
        mesh.run(source, echo=False)
    mesh.record()
    try:
        with pytest.raises(CellError) as raised:
            mesh.run(planted.cell, echo=False)
    finally:
        mesh.record(False)
    return raised.value


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_failure_is_the_same_in_one_process(
    planted: Planted, mesh: Mesh, replayer: Replayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = fail(mesh, planted)
    for number, path in enumerate(sorted((tmp_path / "failures" / "f1").iterdir())[:2]):
        end = replayer.replay(path)
        assert end["difference"] == ""
        assert end["left"] == 0
        ename, text, line = end["error"]
        failure = next(one for one in error.failures if end["rank"] in one.ranks)
        assert (ename, text) == (failure.ename, failure.evalue)
        if number == 0:
            source = next(source for source in (planted.cell, *planted.before) if "# here" in source)
            assert "# here" in source.strip().splitlines()[line - 1]


def test_ranks_that_waited_for_the_failing_one_write_no_bundle(failure: Path) -> None:
    assert [path.name for path in failure.iterdir()] == ["rank2.bundle"]


def test_a_bundle_has_no_environment_variable_that_may_be_a_secret(failure: Path) -> None:
    content = (failure / "rank2.bundle").read_bytes()
    assert SECRET.encode() not in content
    assert b"WORLD_SIZE" in content


def test_the_command_replays_a_bundle_and_compares(failure: Path) -> None:
    done = meshbook("replay", "f1", "--rank", "2", cwd=failure.parent.parent)
    assert done.status == 0, done.err
    assert "TypeError: can't multiply sequence by non-int of type 'float'" in done.err
    assert "as on the mesh: TypeError at line 3" in done.out


def test_the_debugger_stops_at_a_line_and_where_the_exception_was_raised(failure: Path) -> None:
    typed = "p number, total\nc\np row\nq\n"
    done = meshbook("replay", str(failure), "--until", "line 3", "--pdb", text=typed)
    assert done.status == 0, done.err
    assert "(Pdb) (0, 0.0)" in done.out
    assert "(Pdb) {'price': 'n/a'}" in done.out


@pytest.mark.thorough
def test_a_cell_is_edited_and_replayed_with_what_it_had(failure: Path) -> None:
    done = meshbook("replay", str(failure), "--edit", env={"EDITOR": "sed -i s/total.+=.*/total+=1.0/"})
    assert "the edited cell came past where it failed" in done.out, done.err


def test_a_record_is_of_what_the_cell_read_and_not_larger(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mesh.run("read = torch.ones(1 << 20); view = read[4:]; untouched = torch.ones(1 << 22)", echo=False)
    mesh.record()
    mesh.run("read.mul_(2); view.add_(1); total = view.sum()", echo=False)
    saved = mesh.save_record()
    mesh.record(False)
    assert set(saved.num_bytes) == {0, 1, 2, 3}
    assert max(saved.num_bytes.values()) < 1.5 * (4 << 20)
    assert BundleFile(tmp_path / "failures" / "f1" / "rank3.bundle").header.names == ("read", "view")


@pytest.mark.thorough
def test_a_cell_that_is_stopped_in_a_hang_is_replayed_to_the_line_where_it_hung(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mesh.record()
    hang = "x = torch.ones(1)\ndist.all_reduce(x)\nif rank == 0: dist.recv(x, 1)\nelse: import time; time.sleep(600)"
    future = mesh.run(hang, wait=False)
    when(lambda: "recv" in mesh.why().text)
    future.interrupt()
    with pytest.raises(CellError):
        future.result(WAIT_S)
    saved = mesh.save_record()
    mesh.record(False)
    assert set(saved.num_bytes) == {0, 1, 2, 3}
    done = meshbook("replay", "f1", cwd=tmp_path)
    assert "as on the mesh: KeyboardInterrupt at line 3" in done.out, done.err


def test_what_takes_more_memory_than_allowed_is_no_record_and_the_failure_says_so(mesh: Mesh) -> None:
    mesh.run("large = torch.ones(1 << 20)", echo=False)
    mesh.record(limit=1 << 20)
    with pytest.raises(CellError) as before:
        mesh.run("large.sum(); raise ValueError", echo=False)
    with pytest.raises(CellError) as within:
        mesh.run("for _ in range(8): dist.all_reduce(torch.ones(1 << 16))\nraise ValueError", echo=False)
    mesh.record(False)
    assert "no bundle of ranks 0-3: what the cell reads takes more than the 1 MiB" in before.value.__notes__[-1]
    assert "took more than the 1 MiB that a record may take; %mesh record on --limit 4G" in within.value.__notes__[-1]


def test_a_name_that_cannot_be_kept_is_listed_and_the_rest_is_kept(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mesh.run("import threading; lock = other = threading.Lock(); kept = 5", echo=False)
    mesh.record()
    with pytest.raises(CellError) as raised:
        mesh.run("for other in range(2): pass\nkept / 0 if lock and other else None", echo=False, ranks=[2])
    mesh.record(False)
    assert "not in it: lock (cannot pickle '_thread.lock' object)" in raised.value.__notes__[-1]
    found = BundleFile(tmp_path / "failures" / "f1" / "rank2.bundle")
    assert found.header.names == ("kept",)


def test_cells_of_a_mesh_that_does_not_record_have_no_observer(mesh: Mesh) -> None:
    observers = "[type(one).__name__ for one in dist.group.WORLD.health.observers]"
    before = mesh.run(observers, echo=False).values[0]
    mesh.record()
    assert mesh.run(observers, echo=False).values[0] == [*before, "CollectiveLog"]
    mesh.record(False)
    assert mesh.run(observers, echo=False).values[0] == before


def test_a_function_is_replayed_with_the_batch_that_it_was_fed(
    mesh: Mesh, replayer: Replayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mesh.run("offset = rank * 100", echo=False)

    @mesh.remote
    def step(batch: Any, *, limit: float) -> None:
        total = batch.sum()
        dist.all_reduce(total)  # type: ignore[name-defined]  # noqa: F821  # names of the ranks
        if rank == 1 and total > limit:  # type: ignore[name-defined]  # noqa: F821
            raise ValueError(f"{batch.tolist()} {total.item()} {offset}")  # type: ignore[name-defined]  # noqa: F821

    first, second = mesh.feed(iter([numpy.arange(8.0), numpy.arange(8.0) + 8]), view="local", prefetch=0)
    mesh.record()
    step(first, limit=50.0)
    with pytest.raises(CellError) as raised:
        step(second, limit=50.0)
    mesh.record(False)
    assert raised.value.failures[0].evalue == "[10.0, 11.0] 92.0 100"
    end = replayer.replay(tmp_path / "failures" / "f1" / "rank1.bundle")
    assert (end["difference"], end["error"][:2]) == ("", ["ValueError", "[10.0, 11.0] 92.0 100"])


# ---- bundles that cannot be replayed


def copy_of_first(failure: Path, folder: Path, **changes: Any) -> Path:
    """A bundle in which fields of the header are changed; it is signed."""
    found = BundleFile(failure / "rank2.bundle")
    path = folder / "rank2.bundle"
    bundle.write(path, msgspec.structs.replace(found.header, **changes), found.body)
    return path


def test_a_bundle_of_another_python_says_which_python_replays_it(failure: Path, tmp_path: Path) -> None:
    path = copy_of_first(failure, tmp_path, python="3.9")
    with pytest.raises(BundleError, match=r"made by Python 3\.9.* replay it with Python 3\.9"):
        run(ReplayOptions(path))


def test_a_bundle_that_was_changed_is_not_ones_own_and_is_not_run_unasked(failure: Path, tmp_path: Path) -> None:
    path = copy_of_first(failure, tmp_path)
    assert BundleFile(path).is_own
    content = path.read_bytes()
    path.write_bytes(content.replace(b"price", b"pric3"))
    assert not BundleFile(path).is_own
    with pytest.raises(BundleError, match=r"A bundle is code.* add --trust"):
        run(ReplayOptions(path))


def test_a_bundle_of_another_user_or_machine_is_not_run_unasked(
    failure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of_first(failure, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("MESHBOOK_RUNTIME_DIR", str(elsewhere))
    with pytest.raises(BundleError, match=r"was not made by you on this machine"):
        run(ReplayOptions(path))
    trusted = meshbook("replay", str(path), "--trust")
    assert "as on the mesh: TypeError" in trusted.out, trusted.err


def test_a_damaged_bundle_says_so(failure: Path, tmp_path: Path) -> None:
    path = copy_of_first(failure, tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BundleError, match=r"is damaged .* Copy it again"):
        BundleFile(path)
    path.write_bytes(b"MESHBOOK BUNDLE 99\n and more")
    with pytest.raises(BundleError, match="has format 99, and this Meshbook reads format 1"):
        BundleFile(path)
    path.write_text("something else")
    with pytest.raises(BundleError, match="is not a bundle"):
        BundleFile(path)


def test_a_line_that_is_none_is_refused_before_anything_runs(failure: Path) -> None:
    with pytest.raises(UsageError, match='--until "line 40"'):
        run(ReplayOptions(failure, until="soon"))


def test_a_rank_without_a_bundle_and_a_folder_without_any_are_errors_that_list_what_there_is(
    failure: Path, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match=r"has no bundle of rank 0; it has those of 2"):
        run(ReplayOptions(failure, rank=0))
    with pytest.raises(BundleError, match="there is no bundle at"):
        run(ReplayOptions(tmp_path / "f9"))


def test_messages_of_a_gpu_and_a_cpu_may_differ_in_their_last_digits() -> None:
    assert differ_in_digits("loss 1.23456 in step 7", "loss 1.23461 in step 7")
    assert not differ_in_digits("loss 1.23456 in step 7", "loss 1.23456 in step 8")
    assert not differ_in_digits("loss 1.0", "gain 1.0")


# ---- actors


class Ledger(Actor):
    """Its total depends on the order in which others add to it."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.total = 0

    @endpoint
    def add(self, who: int, amount: int) -> None:
        self.order.append(who)
        self.total += amount * len(self.order)

    @endpoint
    async def audit(self) -> None:
        raise OverflowError(f"{self.total} after {self.order} at {current_rank().rank}")


class Payer(Actor):
    def __init__(self, ledger: Any) -> None:
        self.ledger = ledger

    @endpoint
    def pay(self, times: int) -> None:
        for amount in range(times):
            self.ledger.add.call_one(current_rank().rank, amount).get()


@pytest.mark.thorough
def test_a_race_between_actors_is_replayed_in_the_order_that_it_had(
    mesh: Mesh, replayer: Replayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for attempt in range(1, 11):
        mesh.record()
        ledger = mesh.spawn(f"ledger{attempt}", Ledger).slice(rank=1)
        payers = mesh.spawn(f"payer{attempt}", Payer, ledger)
        payers.pay.call(4).get()
        with pytest.raises(ActorError, match="OverflowError") as raised:
            ledger.audit.call_one().get()
        mesh.save_record()
        end = replayer.replay(tmp_path / "failures" / f"f{attempt}" / f"rank1.ledger{attempt}.bundle")
        assert (end["difference"], end["error"][0]) == ("", "OverflowError")
        assert end["error"][1] in str(raised.value)
    mesh.record(False)


@pytest.mark.thorough
def test_an_actor_whose_record_would_take_too_much_is_copied_anew_and_goes_on(
    mesh: Mesh, replayer: Replayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mesh.record(limit=60_000)
    ledger = mesh.spawn("long", Ledger).slice(rank=2)
    for amount in range(400):
        ledger.add.call_one(0, amount).get()
    with pytest.raises(ActorError) as raised:
        ledger.audit.call_one().get()
    mesh.save_record()
    mesh.record(False)
    path = tmp_path / "failures" / "f1" / "rank2.long.bundle"
    assert 1 <= len(BundleFile(path).body.messages) < 401
    assert path.stat().st_size < 120_000
    end = replayer.replay(path)
    assert end["difference"] == ""
    assert end["error"][1] in str(raised.value)
