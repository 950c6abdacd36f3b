"""The methods of `Mesh` that find mistakes: the debugger, records of cells, and what ranks hold differently."""

from __future__ import annotations

from collections.abc import Sequence

from meshbook.controller import comparing, recording, running_debugger, sentinels
from meshbook.controller.checkpoint_methods import CheckpointMethods
from meshbook.controller.differences import Differences
from meshbook.controller.sentinels import NumberReport
from meshbook.errors import UsageError


class DebuggingMethods(CheckpointMethods):
    """Stops, records and compares; a part of `Mesh`."""

    def same(self, *names: str, over: str | None = None, forward: str | None = None) -> Differences:
        """Compare what replicas must hold equally: models, optimizers, tensors, values. Blocks; after running cells.

            mesh.same("model", "opt")
            assert mesh.same("model.layers.3")
            mesh.same(forward="model(x)")

        Replicas are the ranks that a DTensor's placements (FSDP2, tensor parallelism) or DDP's process group say, else
        all that have the name. Ranks compare digests first, bit for bit, and send only tensors that differ: at most 64.

        Args:
            names: on the ranks, or paths from them: "model", "model.layers.3".
            over: an axis: only ranks along it are compared with each other.
            forward: in place of names, an expression that calls modules. The ranks run it without gradients, and the
                first that differs of what its modules hold, take and give is reported; if something does, they run it
                twice. Torch's random numbers and the modules' buffers are put back.

        Returns:
            Differences: true if nothing differs; `.differences`, `.text`; it displays itself in a notebook.

        Raises:
            MeshNameError: no rank has a name.
            MeshShapeError: there is no such axis.
            CellError: what is behind a name cannot be read; or the forward fails, or calls no module.
            UsageError: names and a forward, or neither.
        """
        if forward is not None:
            if names:
                raise UsageError(f"names or a forward; compare {', '.join(names)} in a call of its own")
            return comparing.same_forward(self._session, self._axes, forward, over=over)
        return comparing.same(self._session, self._axes, names, over=over)

    def diff(self, first: int, second: int, /, *names: str) -> Differences:
        """Compare two ranks, name by name, whatever the placements: `mesh.diff(2, 6, "model")`. Blocks.

        Returns:
            Differences: as of `same`.

        Raises:
            MeshNameError: neither rank has a name.
            MeshShapeError: a rank is not in this mesh.
            RankLost: one of them is gone.
            CellError: as `same`.
        """
        return comparing.diff(self._session, self._axes, first, second, names)

    def nan(self, on: bool | None = None) -> NumberReport:
        """Switch the sentinel for numbers that are not finite on or off, and return what it has found. Blocks.

            mesh.nan(True)

        While it is on, the first NaN or infinity in a training step is reported under the cell: step, rank, module,
        operation, line, the largest input, and which ranks it reached by which collective. So is a gradient that
        explodes: three updates with ten times its usual norm. Switching it on begins anew. docs/debugging.md says what
        it costs.

        Args:
            on: None leaves it as it is, and answers also while a cell runs.

        Returns:
            NumberReport: true if all ranks have answered, and nothing was found; `.findings`, `.text`; it displays
                itself in a notebook.

        Raises:
            RankLost: no rank of this view is left.
        """
        if on is not None:
            sentinels.switch(self._session, self.ranks, on=on)
        return sentinels.report(self._session, self.ranks)

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

    def debug(self, ranks: Sequence[int] | int | str | None = None) -> None:
        """Stop ranks in the debugger where they are, in a cell in the background or of another client. Blocks.

            future = mesh.run("train()", wait=False)
            mesh.debug(0)

        The prompt is here, for all ranks that stop; `h` at it lists the commands. `c` lets them go on, `q` ends the
        cell, Ctrl-C leaves and lets them go on. docs/debugging.md says where a rank can stop.

        Args:
            ranks: which ranks, as for `run`; None: all of this view.

        Raises:
            UsageError: nothing runs there, or nobody can type here.
            MeshShapeError: a rank is not in this mesh.
        """
        chosen = self.ranks if ranks is None else self._parse_ranks(ranks)
        running_debugger.debug(self.session, tuple(sorted(chosen)))
