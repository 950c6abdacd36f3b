"""Saves under way, as the supervisor follows them: when a folder is committed, and what ends a save without one."""

from __future__ import annotations

import msgspec
import pytest

from meshbook.supervisor import effects as s
from meshbook.wire import messages
from meshbook.wire.messages import CheckpointWritten, RankError, SavedFile, SavedName
from tests.supervisor.test_state import World, messages_of, steps_of

RANKS = (0, 1, 2, 3)


class Saving(World):
    """A mesh of four ranks that save."""

    def save(self, call: str = "save", *, step: int | None = 800, ranks: tuple[int, ...] = RANKS) -> list[s.Effect]:
        command = messages.SaveCheckpoint(call=call, ranks=ranks, path="/run1", names=("model",), step=step)
        return self.say(command)

    def written(self, rank: int, call: str = "save", *, generation: int = 1, **changes: object) -> list[s.Effect]:
        report = CheckpointWritten(
            rank=rank,
            save=call,
            generation=generation,
            files=(SavedFile(f"__{rank}_0.distcp", 100 + rank, "00"),),
            names=(SavedName("model", "module"),) if rank == 0 else (),
            torch="2.13",
        )
        return self.host(msgspec.structs.replace(report, **changes))

    def all_written(self, call: str = "save") -> list[s.Effect]:
        return [effect for rank in RANKS for effect in self.written(rank, call)]

    def metadata_written(self, call: str = "save", **changes: object) -> list[s.Effect]:
        files = (SavedFile(".metadata", 7, "ff"),)
        return self.written(0, call, is_metadata=True, files=files, **changes)

    def commit(self, effects: list[s.Effect], *, error: str = "") -> list[s.Effect]:
        (commit,) = steps_of(effects, s.CommitCheckpoint)
        return self.state.saves.commit_ended(commit.command.call, "/run1/step-00000800", commit.manifest, error)


@pytest.fixture
def world() -> Saving:
    return Saving()


def reason_of(effects: list[s.Effect], call: str = "save") -> str:
    """Why a save was discarded; its folder is removed and its ranks stop writing."""
    (discarded,) = messages_of(effects, messages.CheckpointDiscarded)
    assert discarded.save == call
    assert [removed.command.call for removed in steps_of(effects, s.RemoveCheckpoint)] == [call]
    assert not steps_of(effects, s.CommitCheckpoint)
    return discarded.reason


def test_files_are_written_when_every_rank_has_copied_its_state_and_not_before(world: Saving) -> None:
    assert not messages_of(world.save(), messages.WriteCheckpoint)
    (write,) = messages_of(world.finish("save"), messages.WriteCheckpoint)
    assert (write.ranks, write.save) == (RANKS, "save")


def test_files_are_not_written_if_a_rank_has_not_copied_its_state(world: Saving) -> None:
    world.save()
    effects = world.finish("save", status="interrupted")
    assert not messages_of(effects, messages.WriteCheckpoint)
    assert "interrupted" in reason_of(effects)


def test_metadata_is_written_when_every_rank_has_written_its_files_and_not_before(world: Saving) -> None:
    assert messages_of(world.save(), messages.SaveCheckpoint)
    for rank in RANKS[:-1]:
        assert world.written(rank) == []
    (write,) = messages_of(world.written(3), messages.WriteCheckpointMetadata)
    assert (write.ranks, write.save) == ((0,), "save")


def test_a_save_is_committed_with_all_files_and_then_reported_to_all_clients(world: Saving) -> None:
    world.join("two")
    world.save()
    world.finish("save", reply={"num_bytes": 1, "seconds": 0.1})
    world.all_written()
    effects = world.metadata_written()
    (commit,) = steps_of(effects, s.CommitCheckpoint)
    manifest = commit.manifest
    assert [file.name for file in manifest.files] == [*(f"__{rank}_0.distcp" for rank in RANKS), ".metadata"]
    assert (manifest.step, manifest.generation, manifest.world_size, manifest.axes) == (800, 1, 4, {"rank": 4})
    assert (manifest.names, manifest.num_bytes, manifest.torch) == ((SavedName("model", "module"),), 413, "2.13")
    ended = world.commit(effects)
    assert messages_of(ended, messages.CheckpointCommitted)[0].folder == "/run1/step-00000800"
    assert steps_of(ended, s.SendToClient)[0].client is None
    assert messages_of(ended, messages.DropCheckpoint)[0].ranks == RANKS
    assert len(world.state.saves) == 0


def test_a_save_is_committed_when_its_client_is_gone(world: Saving) -> None:
    world.save()
    world.state.client_disconnected("one", world.now)
    world.all_written()
    assert messages_of(world.commit(world.metadata_written()), messages.CheckpointCommitted)


def test_a_save_that_spans_two_generations_is_discarded(world: Saving) -> None:
    world.save()
    world.finish("save")
    world.all_written()
    world.run("c1")
    (form,) = messages_of(world.finish("c1", status="error", groups_broken=True), messages.FormGroups)
    assert form.generation == 2
    reason = reason_of(world.metadata_written())
    assert "generation 2" in reason
    assert "generation 1" in reason


def test_ranks_that_saved_in_different_generations_do_not_make_a_checkpoint(world: Saving) -> None:
    world.save()
    world.written(0)
    assert "generation 1" in reason_of(world.written(1, generation=2))


@pytest.mark.parametrize("num_written", range(3))
def test_a_rank_that_dies_before_it_has_written_ends_the_save(world: Saving, num_written: int) -> None:
    world.save()
    for rank in RANKS[:num_written]:
        world.written(rank)
    effects = world.kill(2)
    assert reason_of(effects) == "rank 2 was killed by SIGKILL"
    assert messages_of(effects, messages.DropCheckpoint)[0].ranks == (0, 1, 3)
    assert world.metadata_written() == []


@pytest.mark.parametrize("num_written", [3, 4])
def test_a_save_goes_on_without_a_rank_that_has_written_and_not_without_rank_0(world: Saving, num_written: int) -> None:
    world.save()
    for rank in RANKS[:num_written]:
        world.written(rank)
    assert not messages_of(world.kill(2), messages.CheckpointDiscarded)
    for rank in RANKS[num_written:]:
        world.written(rank)
    assert reason_of(world.kill(0)) == "rank 0 was killed by SIGKILL"


def test_a_call_that_ends_late_does_not_end_a_save_that_is_committed(world: Saving) -> None:
    world.save()
    world.all_written()
    renaming = world.metadata_written()
    assert not messages_of(world.finish("save", status="interrupted"), messages.CheckpointDiscarded)
    assert messages_of(world.commit(renaming), messages.CheckpointCommitted)


def test_a_rank_that_dies_while_the_folder_is_renamed_changes_nothing(world: Saving) -> None:
    world.save()
    world.all_written()
    renaming = world.metadata_written()
    assert not messages_of(world.kill(0), messages.CheckpointDiscarded)
    assert messages_of(world.commit(renaming), messages.CheckpointCommitted)


def test_an_error_of_one_rank_ends_the_save_once(world: Saving) -> None:
    world.save()
    world.written(0)
    assert reason_of(world.written(1, error="No space left on device")) == "rank 1: No space left on device"
    assert world.written(2) == []
    assert world.written(3, error="dropped") == []


def test_a_save_whose_call_fails_is_discarded_with_its_error(world: Saving) -> None:
    world.save()
    error = RankError(ename="CheckpointError", evalue="`model` is not bound", traceback=())
    assert "`model` is not bound" in reason_of(world.finish("save", status="error", error=error))


def test_a_save_that_is_stopped_is_discarded(world: Saving) -> None:
    world.save()
    assert "interrupted" in reason_of(world.finish("save", status="interrupted"))


def test_a_save_that_is_being_written_is_given_up_by_a_stop_of_it_and_blocks_no_resize(world: Saving) -> None:
    world.save()
    world.finish("save")
    resize = messages.ResizeMesh(call="resize", axes={"rank": 2})
    assert "a checkpoint is being saved" in messages_of(world.say(resize), messages.Refused)[0].text
    world.run("c1")
    effects = world.say(messages.Interrupt(RANKS, target="save"))
    assert reason_of(effects) == "it was stopped while it was written"
    assert messages_of(effects, messages.DropCheckpoint)
    assert not messages_of(effects, messages.Interrupt)  # what the ranks run now goes on
    world.finish("c1")
    assert not messages_of(world.say(resize), messages.Refused)


def test_a_stop_while_the_state_is_copied_goes_to_the_ranks(world: Saving) -> None:
    world.save()
    effects = world.say(messages.Interrupt(RANKS, target="save"))
    assert messages_of(effects, messages.Interrupt)
    assert not messages_of(effects, messages.CheckpointDiscarded)


def test_a_stop_of_a_cell_or_of_what_runs_leaves_saves_as_they_are(world: Saving) -> None:
    world.save()
    world.finish("save")
    world.run("c1")
    for target in ("c1", None):
        assert not messages_of(world.say(messages.Interrupt(RANKS, target=target)), messages.CheckpointDiscarded)
    assert len(world.state.saves) == 1


def test_a_save_whose_folder_is_renamed_is_not_given_up(world: Saving) -> None:
    world.save()
    world.finish("save")
    world.all_written()
    commit = world.metadata_written()
    assert not messages_of(world.say(messages.Interrupt(RANKS, target="save")), messages.CheckpointDiscarded)
    assert messages_of(world.commit(commit), messages.CheckpointCommitted)


def test_a_folder_that_cannot_be_renamed_is_discarded_with_the_reason(world: Saving) -> None:
    world.save()
    world.all_written()
    assert reason_of(world.commit(world.metadata_written(), error="it is there already")) == "it is there already"


def test_two_saves_at_once_end_each_for_itself(world: Saving) -> None:
    world.save("first")
    world.save("second", step=801)
    world.all_written("second")
    world.written(0, "first")
    second = world.metadata_written("second")
    assert reason_of(world.written(1, "first", error="full"), "first")
    assert messages_of(world.commit(second), messages.CheckpointCommitted)[0].save == "second"


def test_a_save_of_some_ranks_is_refused_with_the_way_out(world: Saving) -> None:
    (refused,) = messages_of(world.save(ranks=(0, 1)), messages.Refused)
    assert "not with a slice" in refused.text
    assert len(world.state.saves) == 0


def test_reports_of_saves_that_nobody_knows_are_ignored(world: Saving) -> None:
    assert world.written(0, "another") == []
