"""All stacks of a mesh as one prefix tree: frames that ranks share are told once, with the set of ranks.

The idea is STAT's: a thousand stacks are a handful of places, and the odd rank shows as a branch of its own. `merge`
makes the tree, `as_text` draws it, `moved` compares two looks. Pure: source text comes from whoever has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from meshbook.diagnose import looks
from meshbook.diagnose.code import cell_of, is_cell, is_user, library_of, plain, short
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire.messages import ACTOR_THREAD, REMOTE_OPERATION, Frame, RankSnapshot, ThreadStack

# Characters of a source line that are shown.
MAX_SOURCE_CHARS = 80
# Branches that are drawn below one line; the smallest of the rest are counted.
MAX_BRANCHES = 16

SourceOf = Callable[[str, int], str | None]


class Node(Struct, frozen=True, gc=False, omit_defaults=True):
    """One line of code and the ranks whose stacks pass through it."""

    file: str
    line: int
    function: str
    ranks: Ranks
    user: bool  # whether it is the user's code
    children: tuple[Node, ...] = ()  # called from here; most ranks first


class Thread(Struct, frozen=True, gc=False, omit_defaults=True):
    """The stacks of threads of one name."""

    name: str  # "" for the main threads
    ranks: Ranks
    children: tuple[Node, ...]
    num_cut: int = 0  # frames that were left out of the deepest of these stacks


class StackTree(Struct, frozen=True, gc=False, omit_defaults=True):
    """Every stack of a look. Plain data: it can travel."""

    threads: tuple[Thread, ...]  # the main threads first
    num_ranks: int
    cells: dict[str, str] = {}  # file name of a running cell -> "cell 7"
    without: dict[str, Ranks] = {}  # why there is no stack -> of whom


def merge(snapshots: Sequence[RankSnapshot], *, main_only: bool = True) -> StackTree:
    """One tree of all stacks. Pure; 1,024 different stacks of 60 frames take a tenth of a second.

    Args:
        main_only: leave out threads other than those that run cells.
    """
    # Most ranks of a hanging mesh stand at the same place: equal stacks are put in once.
    alike: dict[str, dict[tuple[Frame, ...], list[int]]] = {}
    cut: dict[str, int] = {}
    without: dict[str, list[int]] = {}
    cells: dict[str, str] = {}
    for snapshot in snapshots:
        if snapshot.file and snapshot.cell:
            cells[snapshot.file] = snapshot.cell
        if looks.main_stack(snapshot) is None and not any(_acts(snapshot, stack) for stack in snapshot.stacks):
            without.setdefault(_why_none(snapshot), []).append(snapshot.rank)
        for stack in snapshot.stacks:
            if not stack.frames or (main_only and not stack.main and not _acts(snapshot, stack)):
                continue
            name = "" if stack.main else stack.name
            alike.setdefault(name, {}).setdefault(stack.frames, []).append(snapshot.rank)
            cut[name] = max(cut.get(name, 0), stack.num_cut)
    threads = [
        Thread(
            name=name,
            ranks=tuple(sorted({rank for ranks in stacks.values() for rank in ranks})),
            children=_nodes(list(stacks.items())),
            num_cut=cut[name],
        )
        for name, stacks in sorted(alike.items())
    ]
    return StackTree(
        threads=tuple(threads),
        num_ranks=len({snapshot.rank for snapshot in snapshots}),
        cells=cells,
        without={why: tuple(sorted(ranks)) for why, ranks in without.items()},
    )


def _acts(snapshot: RankSnapshot, stack: ThreadStack) -> bool:
    """Whether it is of an actor's thread in an endpoint, on a rank that runs nothing else."""
    idle = snapshot.call is None
    return idle and stack.name.startswith(ACTOR_THREAD) and looks.user_frame(stack.frames) is not None


def moved(before: Sequence[RankSnapshot], after: Sequence[RankSnapshot]) -> dict[int, bool]:
    """Who got on between two looks: a further collective or step, another call, or another line of the user's code.

    Ranks of which that cannot be said are not in it.
    """
    earlier = {snapshot.rank: snapshot for snapshot in before}
    found = {snapshot.rank: looks.has_moved(earlier.get(snapshot.rank), snapshot) for snapshot in after}
    return {rank: moves for rank, moves in found.items() if moves is not None}


def as_text(
    tree: StackTree,
    *,
    fold_library: bool = True,
    color: bool = False,
    moved: Mapping[int, bool] | None = None,
    source_of: SourceOf | None = None,
) -> str:
    """What `%mesh stacks` prints: the tree, outermost frame first, the user's code marked with `>`.

    Args:
        fold_library: tell what happens in libraries in one line.
        moved: from the function of that name; who moves is then told at the end of each branch.
        source_of: gives the text of a line of a file, or None.
    """
    return "\n".join(_Drawing(tree, fold_library, color, moved or {}, source_of or _no_source).lines())


_NO_STACK = "no stack: "


def _why_none(snapshot: RankSnapshot) -> str:
    if snapshot.exited is not None or snapshot.problem is None:
        return looks.what_it_does(snapshot).words
    return f"{_NO_STACK}{snapshot.problem}"


# ---------------------------------------------------------------------------------------------------------------------
# Merging


def _nodes(stacks: Sequence[tuple[tuple[Frame, ...], list[int]]], start: int = 0) -> tuple[Node, ...]:
    """The branches of different stacks that are equal up to `start`.

    What all stacks of a branch share is walked in one go, so this recurses as often as stacks branch off one of them,
    which is less often than they have frames (host.stacks keeps 200).
    """
    branches: dict[Frame, list[tuple[tuple[Frame, ...], list[int]]]] = {}
    for stack in stacks:
        if len(stack[0]) > start:
            branches.setdefault(stack[0][start], []).append(stack)
    nodes: list[Node] = []
    for branch in branches.values():
        frames, end, children = branch[0][0], len(branch[0][0]), tuple[Node, ...]()
        if len(branch) > 1:
            end = _shared(branch, start + 1)
            children = _nodes(branch, end)
        ranks = tuple(sorted({rank for _, ranks in branch for rank in ranks}))
        for frame in reversed(frames[start:end]):
            children = (Node(frame.file, frame.line, frame.function, ranks, is_user(frame.file), children),)
        nodes += children
    return _most_first(nodes)


def _shared(stacks: Sequence[tuple[tuple[Frame, ...], list[int]]], start: int) -> int:
    """Up to which frame stacks are equal that are up to `start`."""
    end = min(len(frames) for frames, _ in stacks)
    for place in range(start, end):
        column = [frames[place] for frames, _ in stacks]
        if column.count(column[0]) < len(column):
            return place
    return end


def _most_first(nodes: list[Node]) -> tuple[Node, ...]:
    if len(nodes) > 1:
        nodes.sort(key=lambda node: (-len(node.ranks), node.ranks))
    return tuple(nodes)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing

_BOLD, _DIM, _RANKS, _OFF = "\x1b[1m", "\x1b[38;5;243m", "\x1b[36m", "\x1b[0m"


def _no_source(_file: str, _line: int) -> str | None:
    return None


_WRAPPERS = frozenset(("wrapper", "_wrapped_call_impl", "_call_impl", "decorate_context", "inner", "_fn", "__call__"))


def says_little(node: Node) -> bool:
    """Whether a library's frame tells a reader nothing: it only wraps another, or is Meshbook's own."""
    return node.function in _WRAPPERS or library_of(node.file) == "meshbook"


class _Folded(Struct, frozen=True):
    """What happens in libraries below a line, until the user's code comes again."""

    text: str
    ranks: Ranks
    children: tuple[Node | _Folded, ...] = ()


class _Drawing:
    def __init__(
        self, tree: StackTree, fold: bool, color: bool, moved: Mapping[int, bool], source_of: SourceOf
    ) -> None:
        self.tree, self.fold, self.color, self.moved, self.source_of = tree, fold, color, moved, source_of

    def lines(self) -> Iterator[str]:
        for thread in self.tree.threads:
            if thread.name:
                word = "" if thread.name.startswith(ACTOR_THREAD) else "thread "
                yield self._paint(f"{word}{plain(thread.name, 80)} of {name_ranks(thread.ranks)}", _BOLD)
            if thread.num_cut:
                yield self._paint(f"({thread.num_cut} frames of a very deep stack are left out)", _DIM)
            yield from self._below(self._folded(thread.children), "", top=True)
        for why, ranks in self.tree.without.items():
            said = plain(why if why.startswith(_NO_STACK) else looks.verb(why, ranks))
            yield f"{self._ranks(ranks)} {self._paint(said, _DIM)}"
        if not self.tree.threads and not self.tree.without:
            yield "no stacks"

    def _below(self, shown: Sequence[Node | _Folded], indent: str, *, top: bool = False) -> Iterator[str]:
        """The branches below a line, set off from each other."""
        left = shown[MAX_BRANCHES:]
        for place, node in enumerate(shown[:MAX_BRANCHES]):
            last = place == len(shown) - 1
            if top:
                lead = body = indent
            else:
                lead, body = f"{indent}{'└─ ' if last else '├─ '}", f"{indent}{'   ' if last else '│  '}"
            label = f"{self._ranks(node.ranks)} "
            yield from self._chain(node, lead + label, body + " " * len(f"[{format_ranks(node.ranks)}] "))
        if left:
            ranks = [rank for node in left for rank in node.ranks]
            yield f"{indent}{'' if top else '└─ '}{self._ranks(ranks)} at {len(left)} more places"

    def _chain(self, node: Node | _Folded, lead: str, body: str) -> Iterator[str]:
        """A line and those below it, as long as all its ranks go the same way."""
        while True:
            inner = self._folded(node.children) if isinstance(node, Node) else list(node.children)
            goes_on = len(inner) == 1 and inner[0].ranks == node.ranks
            end = "" if inner else self._who_moves(node.ranks)
            yield f"{lead}{self._line(node)}{end}"
            if not goes_on:
                here = set(node.ranks).difference(*(set(child.ranks) for child in inner)) if inner else set()
                if here:
                    inner.append(_Folded("is at this line", tuple(sorted(here))))
                yield from self._below(inner, body)
                return
            node, lead = inner[0], body

    def _folded(self, nodes: Sequence[Node | _Folded]) -> list[Node | _Folded]:
        """These branches with runs of library frames told in one line each."""
        if not self.fold:
            return list(nodes)
        folded: list[Node | _Folded] = []
        for node in nodes:
            if isinstance(node, _Folded) or node.user:
                folded.append(node)
            else:
                folded.append(self._fold(node))
        return folded

    def _fold(self, first: Node) -> _Folded:
        """A run of library frames as one line: how many, whose, what was called, and where it has come to."""
        depth, users, libraries = 0, list[Node](), dict[str, None]()
        told: list[str] = []  # the function that most ranks are in, at each depth; what only wraps another says nothing
        level = [first]
        while level:
            depth += 1
            most = max(level, key=lambda node: len(node.ranks))
            if not says_little(most):
                told.append(plain(most.function, 60))
            below: list[Node] = []
            for node in level:
                libraries[library_of(node.file) or "python"] = None
                for child in node.children:
                    (users if child.user else below).append(child)
            level = below
        where = " … ".join(dict.fromkeys([*told[:1], *told[-1:]])) or plain(first.function, 60)
        count = "1 frame" if depth == 1 else f"{depth} frames"
        users.sort(key=lambda node: (-len(node.ranks), node.ranks))
        return _Folded(f"… {count} of {', '.join(libraries)}: {where}", first.ranks, tuple(users))

    def _line(self, node: Node | _Folded) -> str:
        if isinstance(node, _Folded):
            return self._paint(f"  {node.text}", _DIM)
        cell = self.tree.cells.get(node.file) or cell_of(node.file)
        if cell is None and is_cell(node.file):
            cell = "an earlier cell"
        place = f"{plain(cell, 80) if cell else short(plain(node.file))}, line {node.line}"
        if node.file == REMOTE_OPERATION:
            return self._paint(f"  {plain(node.function, 60)}", _DIM)
        if node.function and node.function != "<module>":
            place += f" in {plain(node.function, 60)}"
        if not node.user:
            return self._paint(f"  {place}", _DIM)
        source = self.source_of(node.file, node.line)
        code = f": {self._paint(plain(source.strip(), MAX_SOURCE_CHARS), _BOLD)}" if source and source.strip() else ""
        return f"> {place}{code}"

    def _who_moves(self, ranks: Ranks) -> str:
        moving = [rank for rank in ranks if self.moved.get(rank)]
        still = [rank for rank in ranks if self.moved.get(rank) is False]
        told = [
            f"{word}: {format_ranks(those)}" for word, those in (("moves", moving), ("stands still", still)) if those
        ]
        if len(told) == 1 and len(moving or still) == len(ranks):
            told = ["moves" if moving else "stands still"]
        return self._paint(f"  ({', '.join(told)})", _DIM) if told else ""

    def _ranks(self, ranks: Iterable[int]) -> str:
        return self._paint(f"[{format_ranks(ranks)}]", _RANKS)

    def _paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_OFF}" if self.color else text
