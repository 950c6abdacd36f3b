"""Keys for what the ranks of a mesh hold themselves, in place of the objects in messages to actors on those ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshbook.controller.missing_modules import missing_module_hint
from meshbook.errors import Failure, TransferError
from meshbook.ids import name_ranks
from meshbook.wire.messages import ActorFailure

if TYPE_CHECKING:
    from meshbook.controller.session import Session


class MeshReferences:
    """Objects that the ranks of a mesh already hold and receive as a key: handles and remote tensors."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def persistent_id_for(self, ranks: Sequence[int], pinned: list[Any]) -> Callable[[Any], str | None]:
        """Return a function that maps an object to its key on these ranks, or to None if it must be sent itself.

        For one message to the actors on these ranks. The function blocks until the ranks have computed a remote tensor:
        their main threads compute it, and actors read it on their own threads.

        Args:
            pinned: receives the objects that the ranks look up; keep it alive until they have.
        """

        def key_of(thing: Any) -> str | None:
            key = self._session._persistent_id(thing)
            if key is None:
                return None
            engine = getattr(thing, "engine", None) if key.startswith("tensor:") else None
            if engine is not None and not any(getattr(other, "engine", None) is engine for other in pinned):
                missing_ranks = sorted(set(ranks) - set(engine.ranks))
                if missing_ranks:
                    raise TransferError(
                        f"a remote tensor lies on {name_ranks(engine.ranks)}, and actors on "
                        f"{name_ranks(missing_ranks)} are to get it too; call a slice of the actors, or pass "
                        "x.full_tensor()"
                    )
                engine.wait()
            pinned.append(thing)
            return key

        return key_of

    def missing_module_hint(self, failures: Mapping[int, ActorFailure]) -> str:
        """Return what to do about a module that ranks on other machines lack and this one has; "" if it is not that."""
        ranks_by_failure: dict[tuple[str, str], list[int]] = {}
        for rank, failure in sorted(failures.items()):
            ranks_by_failure.setdefault((failure.ename, failure.text), []).append(rank)
        distinct = [Failure(tuple(ranks), *failure) for failure, ranks in ranks_by_failure.items()]
        return missing_module_hint(distinct, self._session.info.spec)
