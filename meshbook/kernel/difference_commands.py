"""The commands of `%mesh` about what ranks hold differently."""

from __future__ import annotations

import argparse

from meshbook.controller.differences import Differences
from meshbook.controller.mesh import Mesh
from meshbook.controller.sentinels import NumberReport
from meshbook.errors import UsageError
from meshbook.ids import name_ranks

DIFF_USAGE = "%mesh diff RANK RANK NAME [NAME ...]"


def nan(mesh: Mesh, options: argparse.Namespace) -> NumberReport | None:
    if options.state is None:
        return mesh.nan()
    mesh.nan(options.state == "on")
    if options.state == "on":
        where = name_ranks(mesh.ranks)
        print(f"The first number that is not finite is reported, on {where}; %mesh nan says what was found.")
    else:
        print("The sentinel is off; %mesh nan says what it had found.")
    return None


def same(mesh: Mesh, options: argparse.Namespace) -> Differences:
    return mesh.same(*options.names, over=options.over, forward=options.forward)


def diff(mesh: Mesh, options: argparse.Namespace) -> Differences:
    words = options.words
    if len(words) < 3 or not all(word.isdigit() for word in words[:2]):
        raise UsageError(f"two ranks, then names. Write it like: %mesh diff 0 1 model. {DIFF_USAGE}")
    return mesh.diff(int(words[0]), int(words[1]), *words[2:])
