"""Call sites: the user's lines that issued operations, cheap to capture and formatted only when they are shown."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterable
from types import CodeType, FrameType

import msgspec
import torch

from meshbook.actors.runtime.faults import with_source
from meshbook.wire import messages

_MAX_USER_FRAMES = 3
# Cached kinds of code objects, and cached frames of operations.
_MAX_CACHED_CODES, _MAX_CACHED_FRAMES = 4096, 4096

CallSite = tuple[tuple[CodeType, int], ...]  # code and instruction offset of the user's frames, innermost first

_encoder = msgspec.msgpack.Encoder()
_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
_MESHBOOK_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_getframe = sys._getframe
# Kinds of code objects, by id, because hashing a code object goes through all of it. Code of torch or Meshbook; the
# user's; the user's outermost, which no user code calls: a module, or a cell, which IPython runs.
_LIBRARY_CODE, _USER_CODE, _OUTERMOST_USER_CODE = range(3)
_code_kinds: dict[int, int] = {}
_known_codes: list[CodeType] = []  # keeps them alive, so that their ids stay unique
_MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__
_RUN_BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__
_current_graph_task_id = torch._C._current_graph_task_id  # a distinct number for each call of backward()
# The last backward() that issued operations, and its call site.
_last_backward: tuple[int, CallSite] = (-1, ())
# By instruction address, which is unique while the cache keeps the code alive.
_frame_cache: dict[int, tuple[CodeType, messages.Frame]] = {}


def capture_call_site(depth: int = 2) -> CallSite:
    """Return the user's frames that led to this operation, innermost first, as code and instruction offset.

    At most three frames; the module or cell is the last. Code and offset are cheap to store. This is the most expensive
    part of an operation, so frames are accessed as little as possible. All operations of a backward() get its call
    site, except those of a hook or of a custom function's own backward.
    """
    global _last_backward
    frame: FrameType | None = _getframe(depth)
    found: list[tuple[CodeType, int]] = []
    code_kinds, backward = _code_kinds, None
    while frame is not None:
        code = frame.f_code
        try:
            kind = code_kinds[id(code)]
        except KeyError:
            kind = _classify_code(code)
        if kind:
            found.append((code, frame.f_lasti))
            if kind == _OUTERMOST_USER_CODE or len(found) == _MAX_USER_FRAMES:
                break
        elif code is _RUN_BACKWARD_CODE:
            if not found and (now := _current_graph_task_id()) >= 0:
                last, lines = _last_backward
                if last == now:
                    return lines
                backward = now
        elif code is _MODULE_CALL_CODE and (frame := frame.f_back) is None:  # its caller is torch's too
            break
        frame = frame.f_back
    lines = tuple(found)
    if backward is not None:
        _last_backward = (backward, lines)
    return lines


def _classify_code(code: CodeType) -> int:
    """Return the kind of a code object, and cache it."""
    if len(_known_codes) >= _MAX_CACHED_CODES:  # mostly of cells that ran long ago
        _code_kinds.clear()
        _known_codes.clear()
    _known_codes.append(code)
    if code.co_filename.startswith((_TORCH_DIR, _MESHBOOK_DIR)):
        kind = _LIBRARY_CODE
    else:
        kind = _OUTERMOST_USER_CODE if code.co_name.startswith(("<module>", "<cell line")) else _USER_CODE
    _code_kinds[id(code)] = kind
    return kind


def format_call_site(call_site: CallSite) -> str:
    """Format a call site like a traceback, outermost frame first."""
    shown = []
    for code, instruction in reversed(call_site):
        line = _line_number(code, instruction)
        text = linecache.getline(code.co_filename, line).strip()
        shown.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}\n    {text}')
    return with_source("\n".join(shown))


def encode_call_sites(call_sites: Iterable[CallSite]) -> bytes:
    """Encode the call sites of a batch, for inspection of the ranks while they run it; 0.2 us per operation."""
    index_by_address: dict[int, int] = {}
    frames: list[messages.Frame] = []
    frame_indices: list[int] = []
    frame_index, last = 0, None
    for call_site in call_sites:
        # Skip operations that only free ids, and those of the same backward() as the last one.
        if call_site and call_site is not last:
            last = call_site
            code, instruction = call_site[0]
            address = id(code) + instruction  # unique: a code object contains its instructions
            try:
                frame_index = index_by_address[address]
            except KeyError:
                frame_index = index_by_address[address] = len(frames)
                frames.append(_frame_of(code, instruction))
        frame_indices.append(frame_index)
    if not frames:
        return b""
    cells = {file: cell for file in {line.file for line in frames} if (cell := _cell_label(file)) is not None}
    return _encoder.encode(
        messages.BatchCallSites(lines=tuple(frames), line_indices=tuple(frame_indices), cell_labels=cells)
    )


def innermost_frame(call_site: CallSite) -> messages.Frame | None:
    """Return the innermost user frame of a call site."""
    return _frame_of(*call_site[0]) if call_site else None


def _frame_of(code: CodeType, instruction: int) -> messages.Frame:
    address = id(code) + instruction
    known = _frame_cache.get(address)
    if known is None:
        if len(_frame_cache) >= _MAX_CACHED_FRAMES:  # mostly of cells that ran long ago
            _frame_cache.clear()
        frame = messages.Frame(file=code.co_filename, line=_line_number(code, instruction), function=code.co_name)
        known = _frame_cache[address] = code, frame
    return known[1]


def _cell_label(file: str) -> str | None:
    """Return the label of the cell that has this file name, if this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(file)
    return None if number is None else f"cell {number}"


def _line_number(code: CodeType, instruction: int) -> int:
    """Return the line number of an instruction."""
    return next(
        (number for start, stop, number in code.co_lines() if start <= instruction < stop and number is not None),
        code.co_firstlineno,
    )
