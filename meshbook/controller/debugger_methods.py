"""The methods of `Mesh` for the debugger."""

from __future__ import annotations

from collections.abc import Sequence

from meshbook.controller import running_debugger
from meshbook.controller.checkpoint_methods import CheckpointMethods


class DebuggerMethods(CheckpointMethods):
    """Stops what runs in the debugger; a part of `Mesh`."""

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
