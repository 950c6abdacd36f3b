"""Execute a stream of operations on one engine's tensors.

If an operation raises, a `Poison` replaces its outputs and the tensors it was to mutate; operations with a poisoned
input are skipped and propagate the poison; all others run. An operation that overwrites all of its target needs no
value of it, and so clears its fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshbook.rank.tensors import agreement, watching
from meshbook.rank.tensors.lowering_passes import BEGIN, END
from meshbook.rank.tensors.templates import CompiledTemplate
from meshbook.rank.tensors.tensor_store import Poison, TensorStore, local_tensor

# Control numbers in place of a template's number, followed by a count and that many ids: free the tensors; clear their
# faults.
FREE_IDS, CLEAR_FAULTS = 0, -1

_REPLAY_FUNCTION = "meshbook::replay"


def execute(
    store: TensorStore,
    stream: list[Any],  # int, and float where a template has floats
    first_number: int,
    announce_fault: Callable[[Poison], None],
    is_secondary: Callable[[BaseException], bool],
) -> None:
    """Run a stream of operations.

    Args:
        announce_fault: called if this rank cannot take part in a collective.
        is_secondary: whether an error is the consequence of another rank's.

    Raises:
        KeyboardInterrupt: after all operations that had not run yet have been poisoned.
    """
    values, templates, run = store.values, store.templates, watching.runner()
    at, end, number = 0, len(stream), first_number
    running: tuple[CompiledTemplate, int, list[Any], list[int]] | None = None
    try:
        store.is_batch_expected = False
        while at < end:
            number_or_control = stream[at]
            if number_or_control <= FREE_IDS:
                at = _run_control_op(store, stream, at)
                number += 1
                continue
            template = templates[number_or_control]
            store.op_number, store.current_template = number, template
            start = at + 1
            middle = start + template.num_in
            stop = middle + template.num_new
            next_at = stop + template.num_floats
            ins = list(map(values.get, stream[start:middle]))
            poison, write_started = store.step_refusal, False
            for tensor in ins:
                if tensor is None or tensor.__class__ is Poison:
                    poison = _first_poison(template, ins, number) or poison
                    break
            if poison is None:
                running, at = (template, start, ins, _versions(template, ins) if template.mutates else []), next_at
                try:
                    result = run(template, ins, stream[stop:next_at], number)
                    if template.returns_one:
                        values[stream[middle]] = result
                    elif template.num_new:
                        template.store(result, stream[middle:stop], values)
                    if template.overwrites and store.may_have_poison:
                        _set_overwritten(store, stream, template, start, ins)
                except Exception as error:
                    secondary = is_secondary(error)
                    poison = Poison.of_error(number, error, secondary=secondary)
                    write_started = _has_written(template, ins, running[3], secondary)
                    _record_fault(store, template, poison)
                    # Ranks that refuse a step have replied to each other; a closed connection is known to this rank
                    # only.
                    if template.communicates and not isinstance(error, agreement.StepRefused):
                        announce_fault(poison)
            elif template.communicates:
                _announce_skip(store, template, poison, announce_fault)
            if poison is not None:
                with agreement.defer_interrupts():  # an interrupt between these lines would make them run twice
                    _propagate_poison(store, stream, template, start, poison, write_started=write_started)
                    _update_step_refusal(store, template, poison)
                    running, at, number = None, next_at, number + 1
            else:
                running, at, number = None, next_at, number + 1
        store.op_number, store.current_template = number, None
    except KeyboardInterrupt:
        poison = Poison.of_interrupt(number)
        if running is not None:
            _poison_interrupted(store, stream, poison, *running)
        skip_from(store, stream, at, poison)
        store.step_refusal = None
        store.op_number, store.current_template = number, None
        raise


def skip_from(store: TensorStore, stream: list[Any], at: int, poison: Poison) -> None:
    """Skip the operations from an index on: poison what they would create and mark what they would mutate."""
    store.is_batch_expected = False
    end = len(stream)
    while at < end:
        if stream[at] <= FREE_IDS:
            at = _run_control_op(store, stream, at)
            continue
        template = store.templates[int(stream[at])]
        _propagate_poison(store, stream, template, at + 1, poison)
        at += 1 + template.num_in + template.num_new + template.num_floats


def _run_control_op(store: TensorStore, stream: list[Any], at: int) -> int:
    """Execute a control number, which is no operation; return the index of the next one."""
    next_at = at + 2 + int(stream[at + 1])
    if stream[at] == CLEAR_FAULTS:
        store.clear_poison(stream[at + 2 : next_at])
    else:
        for id in stream[at + 2 : next_at]:
            store.values.pop(id, None)
    return next_at


def _first_poison(template: CompiledTemplate, ins: list[Any], number: int) -> Poison | None:
    """Return the first fault of an operation's inputs. For an overwritten input the value beside its fault is used."""
    for position, tensor in enumerate(ins):
        if tensor is None:
            return Poison(number, "Interrupted", "an earlier operation was stopped", "", True)
        if tensor.__class__ is Poison:
            if tensor.old_value is None or not template.overwrites or position not in template.mutates:
                return tensor
            ins[position] = tensor.old_value
    return None


def _versions(template: CompiledTemplate, ins: Sequence[Any]) -> list[int]:
    """Return version counters of the tensors that are mutated. A torch operator mutates all of them or none."""
    positions = (
        template.mutates if template.name == _REPLAY_FUNCTION else (*template.mutates[:1], *template.mutates[-1:])
    )
    return [local_tensor(ins[position])._version for position in positions]


def _has_written(template: CompiledTemplate, ins: Sequence[Any], versions: list[int], secondary: bool) -> bool:
    """Whether a failed operation may have written a part of what it mutates.

    A broken collective fails before anything is written; of a recorded step the version counters show what it wrote.
    """
    is_unwritten = secondary or template.name == _REPLAY_FUNCTION
    return not is_unwritten or _versions(template, ins) != versions


def _record_fault(store: TensorStore, template: CompiledTemplate, poison: Poison) -> None:
    """Record an operation's fault for the batch's answer, and for the next wait if no tensor can carry it."""
    store.faults.append(poison)
    has_no_tensor = not template.num_new and not template.mutates and template.name != BEGIN
    if has_no_tensor and store.pending_error is None:
        store.pending_error = poison


def _update_step_refusal(store: TensorStore, template: CompiledTemplate, poison: Poison) -> None:
    """Have the operations of a step skipped if it could not begin, until its end."""
    if template.name == BEGIN:
        store.step_refusal = poison.without_old_value()
    elif template.name == END:
        store.step_refusal = None


def _announce_skip(
    store: TensorStore, template: CompiledTemplate, poison: Poison, announce_fault: Callable[[Poison], None]
) -> None:
    """Tell the other ranks that this one skips a collective. Of a step they ask; it fails if the groups are broken."""
    if template.name != BEGIN:
        announce_fault(poison)
        return
    try:
        agreement.all_ranks_ready(store.mesh, False)
    except Exception as error:
        store.faults.append(Poison.of_error(store.op_number, error, secondary=True))


def _set_overwritten(
    store: TensorStore, stream: list[Any], template: CompiledTemplate, start: int, ins: list[Any]
) -> None:
    """Clear the faults of tensors that an operation has overwritten."""
    for index in template.mutates:
        store.values[stream[start + index]] = ins[index]


def _poison_interrupted(
    store: TensorStore,
    stream: list[Any],
    poison: Poison,
    template: CompiledTemplate,
    start: int,
    ins: list[Any],
    versions: list[int],
) -> None:
    """Poison the outputs and mutated inputs of an operation that was interrupted, before or after it wrote anything."""
    middle = start + template.num_in
    for id in stream[middle : middle + template.num_new]:
        if store.values.get(id) is None:
            store.poison_output(id, poison, base=stream[start] if template.is_view else None)
    was_written = bool(template.mutates) and _versions(template, ins) != versions
    if was_written and template.overwrites:
        _set_overwritten(store, stream, template, start, ins)
    if not was_written or template.name == _REPLAY_FUNCTION:
        for index in template.mutates:
            store.poison_unchanged(stream[start + index], poison, write_started=was_written)


def _propagate_poison(
    store: TensorStore,
    stream: list[Any],
    template: CompiledTemplate,
    start: int,
    poison: Poison,
    *,
    write_started: bool = False,
) -> None:
    """Poison the outputs of an operation that was skipped or failed, and mark the tensors it was to mutate.

    Its tensors are listed in `stream` from `start` on.
    """
    middle = start + template.num_in
    for id in stream[middle : middle + template.num_new]:
        store.poison_output(id, poison, base=stream[start] if template.is_view else None)
    for index in template.mutates:
        store.poison_unchanged(stream[start + index], poison, write_started=write_started)
