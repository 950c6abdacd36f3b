"""All stacks of a mesh as one prefix tree: frames that ranks share appear once, with the set of ranks.

The idea is that of STAT: a thousand stacks are a handful of locations, and a deviating rank is a branch of its own.
`merge` builds the tree, `as_text` renders it, `moved_by_rank` compares two samples. Pure: the caller provides source
text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from meshbook.diagnose import rank_activity, snapshot_reader
from meshbook.diagnose.source_files import cell_label, is_cell_file, is_user_file, library_of, sanitize_line, short_path
from meshbook.ids import Ranks, format_ranks, name_ranks
from meshbook.wire.messages import ACTOR_THREAD_PREFIX, REMOTE_OPERATION_FILE, Frame, RankSnapshot, ThreadStack

# Characters of a source line that are shown.
MAX_SOURCE_CHARS = 80
# Branches that are drawn below one line; the smaller ones are counted.
MAX_BRANCHES = 16

SourceOf = Callable[[str, int], str | None]


class StackNode(Struct, frozen=True, gc=False, omit_defaults=True):
    """One line of code and the ranks whose stacks contain it."""

    file: str
    line: int
    function: str
    ranks: Ranks
    is_user_code: bool
    children: tuple[StackNode, ...] = ()  # called from here; ordered by number of ranks, largest first


class ThreadTree(Struct, frozen=True, gc=False, omit_defaults=True):
    """The stacks of all threads with one name."""

    name: str  # "" for the main threads
    ranks: Ranks
    children: tuple[StackNode, ...]
    num_cut: int = 0  # frames left out of the deepest of these stacks


class StackTree(Struct, frozen=True, gc=False, omit_defaults=True):
    """All stacks of one sample. Plain data, so it can be sent."""

    threads: tuple[ThreadTree, ...]  # main threads first
    num_ranks: int
    cells: dict[str, str] = {}  # file name of a running cell -> "cell 7"
    ranks_without_stack: dict[str, Ranks] = {}  # reason -> ranks


def merge(snapshots: Sequence[RankSnapshot], *, main_only: bool = True) -> StackTree:
    """Merge all stacks into one tree. Pure; 1,024 different stacks of 60 frames take 0.1 s.

    Args:
        main_only: leave out threads other than those that run cells.
    """
    # Most ranks of a hanging mesh are at the same location: insert equal stacks once.
    ranks_by_stack: dict[str, dict[tuple[Frame, ...], list[int]]] = {}
    num_cut: dict[str, int] = {}
    without: dict[str, list[int]] = {}
    cells: dict[str, str] = {}
    for snapshot in snapshots:
        if snapshot.file and snapshot.cell:
            cells[snapshot.file] = snapshot.cell
        if snapshot_reader.main_stack(snapshot) is None and not any(
            _is_in_actor_endpoint(snapshot, stack) for stack in snapshot.stacks
        ):
            without.setdefault(_reason_for_no_stack(snapshot), []).append(snapshot.rank)
        for stack in snapshot.stacks:
            if not stack.frames or (main_only and not stack.is_main and not _is_in_actor_endpoint(snapshot, stack)):
                continue
            name = "" if stack.is_main else stack.name
            ranks_by_stack.setdefault(name, {}).setdefault(stack.frames, []).append(snapshot.rank)
            num_cut[name] = max(num_cut.get(name, 0), stack.num_truncated)
    threads = [
        ThreadTree(
            name=name,
            ranks=tuple(sorted({rank for ranks in stacks.values() for rank in ranks})),
            children=_build_nodes(list(stacks.items())),
            num_cut=num_cut[name],
        )
        for name, stacks in sorted(ranks_by_stack.items())
    ]
    return StackTree(
        threads=tuple(threads),
        num_ranks=len({snapshot.rank for snapshot in snapshots}),
        cells=cells,
        ranks_without_stack={why: tuple(sorted(ranks)) for why, ranks in without.items()},
    )


def _is_in_actor_endpoint(snapshot: RankSnapshot, stack: ThreadStack) -> bool:
    """Whether the stack is that of an actor's thread in an endpoint, on a rank that runs nothing else."""
    idle = snapshot.call is None
    return (
        idle
        and stack.name.startswith(ACTOR_THREAD_PREFIX)
        and snapshot_reader.innermost_user_frame(stack.frames) is not None
    )


def moved_by_rank(before: Sequence[RankSnapshot], after: Sequence[RankSnapshot]) -> dict[int, bool]:
    """Return which ranks made progress between two samples: a new collective, step or call, or another user line.

    Ranks for which that is unknown are left out.
    """
    earlier = {snapshot.rank: snapshot for snapshot in before}
    found = {snapshot.rank: snapshot_reader.has_moved(earlier.get(snapshot.rank), snapshot) for snapshot in after}
    return {rank: has_moved for rank, has_moved in found.items() if has_moved is not None}


def as_text(
    tree: StackTree,
    *,
    fold_library: bool = True,
    color: bool = False,
    moved: Mapping[int, bool] | None = None,
    source_of: SourceOf | None = None,
) -> str:
    """Return what `%mesh stacks` prints: the tree, outermost frame first, the user's code marked with `>`.

    Args:
        fold_library: show each run of library frames as one line.
        moved: result of `moved_by_rank`, shown at the end of each branch.
        source_of: returns the text of a line of a file, or None.
    """
    return "\n".join(_TreeRenderer(tree, fold_library, color, moved or {}, source_of or _no_source).lines())


_NO_STACK_PREFIX = "no stack: "


def _reason_for_no_stack(snapshot: RankSnapshot) -> str:
    if snapshot.exited is not None or snapshot.problem is None:
        return rank_activity.activity_of(snapshot).phrase
    return f"{_NO_STACK_PREFIX}{snapshot.problem}"


# ---------------------------------------------------------------------------------------------------------------------
# Merging


def _build_nodes(stacks: Sequence[tuple[tuple[Frame, ...], list[int]]], start: int = 0) -> tuple[StackNode, ...]:
    """Build the branches of different stacks that are equal up to `start`.

    The frames that all stacks of a branch share are processed in one step. So the recursion is as deep as stacks branch
    off one of them, which is less than their number of frames (200 at most, `MAX_END_FRAMES` from each end).
    """
    branches: dict[Frame, list[tuple[tuple[Frame, ...], list[int]]]] = {}
    for stack in stacks:
        if len(stack[0]) > start:
            branches.setdefault(stack[0][start], []).append(stack)
    nodes: list[StackNode] = []
    for branch in branches.values():
        frames, end, children = branch[0][0], len(branch[0][0]), tuple[StackNode, ...]()
        if len(branch) > 1:
            end = _common_prefix_length(branch, start + 1)
            children = _build_nodes(branch, end)
        ranks = tuple(sorted({rank for _, ranks in branch for rank in ranks}))
        for frame in reversed(frames[start:end]):
            children = (StackNode(frame.file, frame.line, frame.function, ranks, is_user_file(frame.file), children),)
        nodes += children
    return _sorted_by_num_ranks(nodes)


def _common_prefix_length(stacks: Sequence[tuple[tuple[Frame, ...], list[int]]], start: int) -> int:
    """Return the index up to which the stacks are equal, given that they are equal up to `start`."""
    end = min(len(frames) for frames, _ in stacks)
    for depth in range(start, end):
        column = [frames[depth] for frames, _ in stacks]
        if column.count(column[0]) < len(column):
            return depth
    return end


def _sorted_by_num_ranks(nodes: list[StackNode]) -> tuple[StackNode, ...]:
    if len(nodes) > 1:
        nodes.sort(key=lambda node: (-len(node.ranks), node.ranks))
    return tuple(nodes)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing

_BOLD, _DIM, _CYAN, _RESET = "\x1b[1m", "\x1b[38;5;243m", "\x1b[36m", "\x1b[0m"


def _no_source(_file: str, _line: int) -> str | None:
    return None


_WRAPPERS = frozenset(("wrapper", "_wrapped_call_impl", "_call_impl", "decorate_context", "inner", "_fn", "__call__"))


def is_uninformative(node: StackNode) -> bool:
    """Whether a library's frame is of no use to a reader: a wrapper around another, or Meshbook's own."""
    return node.function in _WRAPPERS or library_of(node.file) == "meshbook"


class _FoldedFrames(Struct, frozen=True):
    """The library frames below a line, up to the next user frame."""

    text: str
    ranks: Ranks
    children: tuple[StackNode | _FoldedFrames, ...] = ()


class _TreeRenderer:
    def __init__(
        self, tree: StackTree, fold: bool, color: bool, moved: Mapping[int, bool], source_of: SourceOf
    ) -> None:
        self.tree, self.fold, self.color, self.moved, self.source_of = tree, fold, color, moved, source_of

    def lines(self) -> Iterator[str]:
        for thread in self.tree.threads:
            if thread.name:
                prefix = "" if thread.name.startswith(ACTOR_THREAD_PREFIX) else "thread "
                yield self._colorize(f"{prefix}{sanitize_line(thread.name, 80)} of {name_ranks(thread.ranks)}", _BOLD)
            if thread.num_cut:
                yield self._colorize(f"({thread.num_cut} frames of a very deep stack are left out)", _DIM)
            yield from self._branch_lines(self._fold_nodes(thread.children), "", top=True)
        for why, ranks in self.tree.ranks_without_stack.items():
            text = sanitize_line(why if why.startswith(_NO_STACK_PREFIX) else rank_activity.conjugate(why, ranks))
            yield f"{self._rank_label(ranks)} {self._colorize(text, _DIM)}"
        if not self.tree.threads and not self.tree.ranks_without_stack:
            yield "no stacks"

    def _branch_lines(
        self, shown: Sequence[StackNode | _FoldedFrames], indent: str, *, top: bool = False
    ) -> Iterator[str]:
        """Yield the branches below a line, each with its tree prefix."""
        not_shown = shown[MAX_BRANCHES:]
        for index, node in enumerate(shown[:MAX_BRANCHES]):
            last = index == len(shown) - 1
            if top:
                lead = body = indent
            else:
                lead, body = f"{indent}{'└─ ' if last else '├─ '}", f"{indent}{'   ' if last else '│  '}"
            label = f"{self._rank_label(node.ranks)} "
            yield from self._chain_lines(node, lead + label, body + " " * len(f"[{format_ranks(node.ranks)}] "))
        if not_shown:
            ranks = [rank for node in not_shown for rank in node.ranks]
            yield f"{indent}{'' if top else '└─ '}{self._rank_label(ranks)} at {len(not_shown)} more places"

    def _chain_lines(self, node: StackNode | _FoldedFrames, lead: str, body: str) -> Iterator[str]:
        """Yield a line and those below it, while all its ranks take the same path."""
        while True:
            inner = self._fold_nodes(node.children) if isinstance(node, StackNode) else list(node.children)
            goes_on = len(inner) == 1 and inner[0].ranks == node.ranks
            end = "" if inner else self._movement_note(node.ranks)
            yield f"{lead}{self._format_line(node)}{end}"
            if not goes_on:
                ranks_here = set(node.ranks).difference(*(set(child.ranks) for child in inner)) if inner else set()
                if ranks_here:
                    inner.append(_FoldedFrames("is at this line", tuple(sorted(ranks_here))))
                yield from self._branch_lines(inner, body)
                return
            node, lead = inner[0], body

    def _fold_nodes(self, nodes: Sequence[StackNode | _FoldedFrames]) -> list[StackNode | _FoldedFrames]:
        """Return these branches with each run of library frames folded into one line."""
        if not self.fold:
            return list(nodes)
        folded: list[StackNode | _FoldedFrames] = []
        for node in nodes:
            if isinstance(node, _FoldedFrames) or node.is_user_code:
                folded.append(node)
            else:
                folded.append(self._fold_library_frames(node))
        return folded

    def _fold_library_frames(self, first: StackNode) -> _FoldedFrames:
        """Fold a run of library frames into one line: their number, libraries, first and innermost function."""
        depth, users, libraries = 0, list[StackNode](), dict[str, None]()
        function_names: list[str] = []  # at each depth the function that most ranks are in, except uninformative ones
        level = [first]
        while level:
            depth += 1
            most = max(level, key=lambda node: len(node.ranks))
            if not is_uninformative(most):
                function_names.append(sanitize_line(most.function, 60))
            below: list[StackNode] = []
            for node in level:
                libraries[library_of(node.file) or "python"] = None
                for child in node.children:
                    (users if child.is_user_code else below).append(child)
            level = below
        where = " … ".join(dict.fromkeys([*function_names[:1], *function_names[-1:]])) or sanitize_line(
            first.function, 60
        )
        count = "1 frame" if depth == 1 else f"{depth} frames"
        users.sort(key=lambda node: (-len(node.ranks), node.ranks))
        return _FoldedFrames(f"… {count} of {', '.join(libraries)}: {where}", first.ranks, tuple(users))

    def _format_line(self, node: StackNode | _FoldedFrames) -> str:
        if isinstance(node, _FoldedFrames):
            return self._colorize(f"  {node.text}", _DIM)
        cell = self.tree.cells.get(node.file) or cell_label(node.file)
        if cell is None and is_cell_file(node.file):
            cell = "an earlier cell"
        location = f"{sanitize_line(cell, 80) if cell else short_path(sanitize_line(node.file))}, line {node.line}"
        if node.file == REMOTE_OPERATION_FILE:
            return self._colorize(f"  {sanitize_line(node.function, 60)}", _DIM)
        if node.function and node.function != "<module>":
            location += f" in {sanitize_line(node.function, 60)}"
        if not node.is_user_code:
            return self._colorize(f"  {location}", _DIM)
        source = self.source_of(node.file, node.line)
        code = (
            f": {self._colorize(sanitize_line(source.strip(), MAX_SOURCE_CHARS), _BOLD)}"
            if source and source.strip()
            else ""
        )
        return f"> {location}{code}"

    def _movement_note(self, ranks: Ranks) -> str:
        moving = [rank for rank in ranks if self.moved.get(rank)]
        stalled = [rank for rank in ranks if self.moved.get(rank) is False]
        parts = [
            f"{word}: {format_ranks(those)}" for word, those in (("moves", moving), ("stands still", stalled)) if those
        ]
        if len(parts) == 1 and len(moving or stalled) == len(ranks):
            parts = ["moves" if moving else "stands still"]
        return self._colorize(f"  ({', '.join(parts)})", _DIM) if parts else ""

    def _rank_label(self, ranks: Iterable[int]) -> str:
        return self._colorize(f"[{format_ranks(ranks)}]", _CYAN)

    def _colorize(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_RESET}" if self.color else text
