"""Completion, inspection and previews of names, for the service thread.

The main thread may be in the middle of user code, so nothing here runs user code, blocks, or prints. Where IPython's
own guarded evaluation gives up, expressions are resolved by `static_values`.
"""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import ast
import inspect as std_inspect
import itertools
import keyword
import linecache
import re
import textwrap
import types
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec
from IPython.core.completer import completions_sorting_key
from IPython.utils.tokenutil import token_at_cursor

from meshbook.rank.previews.preview import preview
from meshbook.rank.previews.static_descriptions import type_name
from meshbook.rank.previews.static_values import (
    MISSING,
    instance_dict,
    is_torch_module,
    is_torch_tensor,
    module_dicts,
    resolve_statically,
)

if TYPE_CHECKING:
    from meshbook.rank.cells.shell import RankShell

MAX_MATCHES: Final = 1000
MAX_PEEK_CHARS: Final = 400
MAX_SOURCE_CHARS: Final = 50_000

# An expression of names, attributes and simple subscripts.
_EXPRESSION: Final = r"((?:[^\W\d]\w*)(?:\.[^\W\d]\w*|\[[^\[\]\n]*\])*)"
_EXPRESSION_TAIL: Final = re.compile(_EXPRESSION + r"\Z")
# The same, and the beginning of an attribute, or of a key in brackets, after it.
_ATTRIBUTE_TAIL: Final = re.compile(_EXPRESSION + r"\s*\.(\w*)\Z")
_SUBSCRIPT_TAIL: Final = re.compile(_EXPRESSION + r"\s*\[\s*(['\"]?)([^'\"\[\]\n]*)\Z")
_FUNCTION_TYPES: Final = frozenset(
    {
        types.FunctionType,
        types.MethodType,
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.MethodWrapperType,
        types.ClassMethodDescriptorType,
    }
)


def complete(shell: RankShell, code: str, cursor: int) -> dict[str, Any]:
    """Return the completions at the cursor.

    Args:
        cursor: in characters from the beginning of `code`.

    Returns:
        `matches`, which replace `code[cursor_start:cursor_end]`, best first; `types`, one word for each ("function",
            "attribute", "param", "magic", ...; "" where unknown).
    """
    cursor = max(0, min(cursor, len(code)))
    before = code[:cursor]
    with shell.output.muted():  # IPython prints the tracebacks of failing matchers
        start, texts = _aligned(before, _ipython_completions(shell, before, code))
    subscript_tail, attribute_tail = _SUBSCRIPT_TAIL.search(before), _ATTRIBUTE_TAIL.search(before)
    if subscript_tail is not None and not any(kind == "dict key" for _, kind in texts):
        expression, quote, prefix = subscript_tail.groups()
        keys = _key_completions(resolve_statically(shell.user_ns, expression), quote, prefix)
        if keys:
            start, texts = subscript_tail.start(3) if quote else cursor, keys
    elif attribute_tail is not None and not texts:
        expression, prefix = attribute_tail.groups()
        start = attribute_tail.start(2)
        texts = _attribute_completions(resolve_statically(shell.user_ns, expression), prefix)
    if before[:start].rpartition("\n")[2].strip() and not before[start:].startswith("%"):
        # a magic is only valid at the start of a line
        texts = [(text, kind) for text, kind in texts if kind != "magic"]
    kinds: dict[str, str] = {}
    for text, kind in texts:
        if not kinds.get(text):  # of equal texts the first with a known type counts
            kinds[text] = "" if kind == "<unknown>" else kind
    matches = list(kinds)[:MAX_MATCHES]
    return {
        "matches": matches,
        "cursor_start": start,
        "cursor_end": cursor,
        "types": [kinds[text] for text in matches],
    }


def inspect(shell: RankShell, code: str, cursor: int, detail: int = 0) -> dict[str, Any]:
    """Return what `?` (detail 0) and `??` (detail 1) show for the name, or the called function, at the cursor.

    Returns:
        `found`, and `data` with its text/plain; `name`, the expression that was looked up.
    """
    cursor = max(0, min(cursor, len(code)))
    name = _magic_at(code, cursor) or token_at_cursor(code, cursor)
    subscripted = _subscripted_at(code, cursor)
    if subscripted is not None and resolve_statically(shell.user_ns, subscripted) is not MISSING:
        name = subscripted
    if not name:
        return {"found": False, "data": {}, "name": ""}
    if name.startswith("%"):
        return _inspect_magic(shell, name, detail)
    obj = resolve_statically(shell.user_ns, name)
    if obj is MISSING:
        if shell.find_line_magic(name) is not None or shell.find_cell_magic(name) is not None:
            return _inspect_magic(shell, name, detail)
        return {"found": False, "data": {}, "name": name}
    return {"found": True, "data": {"text/plain": _render_inspection(shell, name, obj, detail)}, "name": name}


def peek(shell: RankShell, names: Iterable[str]) -> dict[str, Any]:
    """Return previews of names and of attributes and subscripts of them (`x`, `model.fc.weight`, `batches[0]`).

    Returns:
        For each name its `messages.Preview` as plain data; None where it does not exist, or cannot be previewed without
            running user code.
    """
    previews: dict[str, Any] = {}
    for name in names:
        obj = resolve_statically(shell.user_ns, name)
        if obj is MISSING:
            previews[name] = None
        else:
            previews[name] = msgspec.to_builtins(preview(obj, text_limit=MAX_PEEK_CHARS, rich=False, safe=True))
    return previews


# ---------------------------------------------------------------------------------------------------------------------
# Completion


def _aligned(before: str, completions: list[tuple[int, str, str]]) -> tuple[int, list[tuple[str, str]]]:
    """Return one start for all completions at the end of `before`, and their texts from there, with their types."""
    if not completions:
        return len(before), []
    start = min(match_start for match_start, _, _ in completions)
    texts = [(before[start:match_start] + text, kind) for match_start, text, kind in completions]
    if before[start:].startswith(".") and all(text.startswith(".") for text, _ in texts):
        return start + 1, [(text[1:], kind) for text, kind in texts]
    return start, texts


def _ipython_completions(shell: RankShell, before: str, code: str) -> list[tuple[int, str, str]]:
    """Return IPython's completions at the end of `before`, as (start of the text, text, type), in IPython's order.

    Calls a private method: the public one changes the process's warning filters during each call, which would affect
    the main thread.
    """
    line = before.count("\n")
    column = len(before) - (before.rfind("\n") + 1)
    try:
        results = shell.Completer._complete(full_text=code, cursor_line=line, cursor_pos=column)
    except Exception:
        return []
    ordered: list[tuple[int, str, str]] = []
    sortable: list[tuple[int, str, str]] = []
    for result in results.values():
        fragment = result.get("matched_fragment", "")
        if not before.endswith(fragment):
            continue
        begin = len(before) - len(fragment)
        target = ordered if result.get("ordered", False) else sortable
        target += [
            (begin, completion.text, completion.type or "")
            for completion in itertools.islice(result["completions"], MAX_MATCHES)
        ]
    sortable.sort(key=lambda match: completions_sorting_key(match[1]))
    return ordered + sortable


def _attribute_completions(obj: Any, prefix: str) -> list[tuple[str, str]]:
    """Return the attribute names of an object that start with `prefix`, those with underscores last."""
    if obj is MISSING:
        return []
    kind = type(obj)
    names: set[str] = set(instance_dict(obj))
    if is_torch_module(kind):
        names.update(*module_dicts(obj))
    for owner in type.mro(obj) if issubclass(kind, type) else kind.__mro__:
        names.update(vars(owner))
    chosen = sorted(
        (name for name in names if name.startswith(prefix) and name.isidentifier() and not keyword.iskeyword(name)),
        key=lambda name: (name.startswith("__"), name.startswith("_"), name),
    )
    if not prefix:
        chosen = [name for name in chosen if not name.startswith("__")]
    return [(name, "attribute") for name in chosen]


def _key_completions(obj: Any, quote: str, prefix: str) -> list[tuple[str, str]]:
    """Return the keys of a dict that start with `prefix`: after an open quote the key's text, else literals."""
    if not issubclass(type(obj), dict):
        return []
    found = []
    for key in itertools.islice(dict.keys(obj), MAX_MATCHES):
        if type(key) is str and key.startswith(prefix) and (quote or not prefix):
            found.append((key if quote else repr(key), "dict key"))
        elif type(key) is int and not quote and not prefix:
            found.append((str(key), "dict key"))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Inspection


def _magic_at(code: str, cursor: int) -> str | None:
    """Return the magic at the cursor, such as `%timeit`."""
    for match in re.finditer(r"^\s*(%{1,2}\w+)|=\s*(%\w+)", code, re.MULTILINE):
        group = 1 if match.group(1) else 2
        if match.start(group) <= cursor <= match.end(group):
            return match.group(group)
    return None


def _subscripted_at(code: str, cursor: int) -> str | None:
    """Return `layers[0].weight` if the cursor is in its last word; IPython's own token finder stops at brackets."""
    end = cursor
    while end < len(code) and (code[end].isalnum() or code[end] == "_"):
        end += 1
    match = _EXPRESSION_TAIL.search(code[:end])
    return match.group(1) if match is not None and "[" in match.group(1) else None


def _inspect_magic(shell: RankShell, name: str, detail: int) -> dict[str, Any]:
    """Return IPython's own inspection: a magic's help is its docstring, and involves no user object."""
    try:
        with shell.output.muted():
            data = shell.object_inspect_mime(name, detail_level=detail)
    except Exception:
        return {"found": False, "data": {}, "name": name}
    return {"found": True, "data": {"text/plain": data["text/plain"]}, "name": name}


def _render_inspection(shell: RankShell, name: str, obj: Any, detail: int) -> str:
    """Return IPython's sections, in its order and colours.

    IPython's own inspector calls `str`, `len` and more on the object.
    """
    kind = type(obj)
    if issubclass(kind, type) or kind in _FUNCTION_TYPES:
        sections = [
            *_signature_section(shell, obj, name, "Init signature" if issubclass(kind, type) else "Signature"),
            *_document_sections(shell, obj, detail, "Docstring"),
            ("Type", kind.__name__),
        ]
    else:
        documented, title = (obj, "Docstring") if kind is types.ModuleType else (kind, "Class docstring")
        sections = [
            *_signature_section(shell, obj, name, "Signature"),
            ("Type", type_name(kind)),
            ("String form", preview(obj, text_limit=MAX_PEEK_CHARS, rich=False, safe=True).text),
            *([] if (length := _length(obj, kind)) is None else [("Length", f"{length:,}")]),
            *_document_sections(shell, documented, detail, title),
        ]
    width = max(len(title) for title, _ in sections)
    return "\n".join(
        f"\x1b[31m{title}:\x1b[39m{' ' * (width - len(title))}{chr(10) if chr(10) in body else ' '}{body}"
        for title, body in sections
    )


def _signature_section(shell: RankShell, obj: Any, name: str, title: str) -> list[tuple[str, str]]:
    signature = _signature(obj, name, type(obj))
    return [(title, shell.inspector.format(signature).rstrip())] if signature else []


def _document_sections(shell: RankShell, documented: Any, detail: int, title: str) -> list[tuple[str, str]]:
    """Return the source, if wanted and known, else the docstring; and the file."""
    source = _source_text(shell, documented) if detail else None
    if source:
        sections = [("Source", shell.inspector.format(source[:MAX_SOURCE_CHARS]).rstrip())]
    else:
        sections = [(title, _docstring(documented) or "<no docstring>")]
    file = _source_file(documented)
    return [*sections, ("File", file)] if file else sections


def _signature(obj: Any, name: str, kind: type) -> str | None:
    """Return `name(a, b=1)`; for a callable instance, the signature comes from its class."""
    target = obj
    if not issubclass(kind, type) and kind not in _FUNCTION_TYPES:
        call = std_inspect.getattr_static(kind, "__call__", MISSING)
        forward = std_inspect.getattr_static(kind, "forward", MISSING) if is_torch_module(kind) else MISSING
        target = forward if type(forward) is types.FunctionType else call
        if type(target) is not types.FunctionType:
            return None
        target = types.MethodType(target, obj)
    try:
        rendered = str(std_inspect.signature(target))
    except Exception:  # a C function without a signature, an object with a wrong one
        return None
    if len(name) + len(rendered) > 75 and "," in rendered:
        parts = [str(parameter) for parameter in std_inspect.signature(target).parameters.values()]
        returned = rendered.rpartition(") -> ")[2] if ") -> " in rendered else ""
        lines = "".join(f"    {part},\n" for part in parts)
        return f"{name}(\n{lines}){' -> ' + returned if returned else ''}"
    return f"{name}{rendered}"


def _length(obj: Any, kind: type) -> int | None:
    if kind in (list, tuple, dict, set, frozenset, str, bytes, bytearray, range):
        return len(obj)
    if is_torch_tensor(kind) and kind.__module__.partition(".")[0] == "torch" and obj.dim():
        return int(obj.shape[0])
    return None


def _docstring(obj: Any) -> str | None:
    document = std_inspect.getattr_static(obj, "__doc__", None)
    if not isinstance(document, str):  # of a method or a C function: a descriptor, which runs no user code
        document = getattr(obj, "__doc__", None) if type(obj) in _FUNCTION_TYPES or type(obj) is type else None
    return std_inspect.cleandoc(document) if isinstance(document, str) and document.strip() else None


def _source_file(obj: Any) -> str | None:
    try:
        return std_inspect.getsourcefile(std_inspect.unwrap(obj)) or std_inspect.getfile(obj)
    except Exception:
        return None


def _source_text(shell: RankShell, obj: Any) -> str | None:
    try:
        source = std_inspect.getsource(obj)
    except Exception:
        source = None
    if source is None and isinstance(obj, type):
        source = _class_source_in_cells(shell, obj)
    return textwrap.dedent(source).rstrip() if source else None


def _class_source_in_cells(shell: RankShell, cls: type) -> str | None:
    """Return the source of a class that a cell defined: `inspect` looks for a file of `__main__`, which has none."""
    names = {
        function.__code__.co_filename for function in vars(cls).values() if isinstance(function, types.FunctionType)
    }
    cells = [name for name in reversed(list(shell.compile._filename_map)) if not names or name in names]
    for cell in cells:
        text = "".join(linecache.getlines(cell))
        if f"class {cls.__name__}" not in text:
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
    return None
