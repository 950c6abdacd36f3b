"""The methods of `Mesh` for recording cells."""

from __future__ import annotations

from meshbook.controller import recording
from meshbook.controller.checkpoint_methods import CheckpointMethods


class RecordingMethods(CheckpointMethods):
    """Records cells, so that a failure can be replayed in one process; a part of `Mesh`."""

    def record(self, on: bool = True, *, limit: int = recording.DEFAULT_LIMIT) -> None:
        """Have each rank keep what a replay of the last cell needs, from the next cell on. See docs/debugging.md.

        When a recorded cell fails or is stopped, each failing rank writes a bundle to failures/fN in the folder of this
        process, and the error says so; `meshbook replay failures/fN` runs that rank's part again, in one process.

        Args:
            on: False ends it, and drops what is kept.
            limit: bytes of memory that a record may take on each rank. A cell that needs more is not recorded, and its
                failure says so.
        """
        recording.set_recording(self.session, on, limit)

    def save_record(self) -> recording.SavedRecords:
        """Write what each rank has kept of the last recorded cell as bundles, however it ended. Blocks.

        Returns:
            SavedRecords: the folder, and what is missing; its text is what `%mesh record save` shows.

        Raises:
            RankLost: no rank is left.
        """
        return recording.save(self.session, self.session.living(self.ranks))
