"""Processes compare a step before its first call: the notes that they exchange.

If one process has another learning rate, seed or reducer than the others, collectives match by
chance, or wait for each other for ever. So each process leaves a digest of its step (`digest.py`),
and the first one compares them. It tells the others, so that all raise the same error. It waits for
a limited time, and names who does not come.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxsparse.processes.digest import Digested, Parts
from jaxsparse.processes.group import ProcessGroup

# Seconds for which the first process, which keeps the notes, stays until the others have read them.
_FAREWELL = 5.0
# Where the operations of an exchange stand, in the place of an operation.
_ROOMS = "arrays", "quantize", "select", "codecs", "sketch", "collectives", "reducers"
_EXCHANGES = [f"/jaxsparse/{room}/" for room in _ROOMS]
_FILES = 5  # number of files with differences that a message names


def compare(group: ProcessGroup, step: Any, mesh: Mesh, args: Any) -> None:
    """Compares a step and its arguments, before its first call, with those of other processes.

    All processes of the group must get here, for the same steps in the same order. Raises
    RuntimeError if processes differ, or one does not come within the limit of the group.
    """
    program = step.trace(*args).jaxpr  # JAX keeps it: the call does not trace again
    if len(program.in_avals) != len(jax.tree.leaves(args)):
        raise ValueError(
            f"{getattr(step, '__name__', 'a step')} has static arguments, which processes do not "
            "compare: close over them, as in jax.jit(functools.partial(step, flag=True))"
        )
    own = Digested(program, mesh, args)
    _compare(group, getattr(step, "__name__", "a step"), own)


def compare_texts(group: ProcessGroup, name: str, texts: Iterable[str]) -> None:
    """Compares texts, such as settings for a call of this name, as `compare` does a step."""
    _compare(group, name, Parts(texts))


def agree(group: ProcessGroup, said: str) -> None:
    """Compares what this process does next with what the first one does, which does not wait.

    That takes less than `compare_texts`: one message, however many processes there are.
    """
    first, me = group.members[0], jax.process_index()
    heard = group.announce(said if me == first else None)
    if heard != said:
        raise RuntimeError(
            f"process {me} {said}, but process {first} {heard}: all processes must take equally "
            "many steps. Give all of them as many batches, and the same checkpoint"
        )


def _compare(group: ProcessGroup, name: str, own: Parts) -> None:
    topic = group.topic()
    group.put(f"{topic} digest", own.digest)
    is_first = jax.process_index() == group.members[0]
    problem = (_of_all if is_first else _as_told)(group, topic, name, own)
    if problem:
        raise RuntimeError(problem)


def _of_all(group: ProcessGroup, topic: str, name: str, own: Parts) -> str:
    """Compares all notes, and tells the others what is wrong, or nothing."""
    others = group.members[1:]
    notes = group.get(f"{topic} digest", others)
    missing = [p for p, note in zip(others, notes) if note is None]
    differing = [p for p, note in zip(others, notes) if note not in (None, own.digest)]
    problem = _missing(missing, name, group) if missing else ""
    if differing:
        group.put(f"{topic} lines", "\n".join([name, *own.lines()]))
        problem = group.get(f"{topic} difference", differing[:1])[0] or "processes differ"
    group.put(f"{topic} problem", problem)
    if problem:
        group.get(f"{topic} heard", [p for p in others if p not in missing], _FAREWELL)
    return problem


def _as_told(group: ProcessGroup, topic: str, name: str, own: Parts) -> str:
    """What is wrong according to the first process, or nothing."""
    first = group.members[:1]
    theirs = group.get(f"{topic} digest", first)[0]
    if theirs is not None and theirs != own.digest:
        lines = group.get(f"{topic} lines", first)[0] or ""
        group.put(
            f"{topic} difference",
            _difference(group, lines.split("\n"), [name, *own.lines()]),
        )
    # The first process waits as long as this one, but perhaps from a later time.
    for _ in range(0 if theirs is None else 2):
        problem = group.get(f"{topic} problem", first)[0]
        if problem is not None:
            group.put(f"{topic} heard", "")
            return problem
    return _missing(first, name, group)


def _missing(processes: Sequence[int], name: str, group: ProcessGroup) -> str:
    return (
        f"process {', '.join(map(str, processes))} did not come to the first call of {name!r} with "
        f"these shapes within {group.limit:g} s, but process {jax.process_index()} did. All "
        "processes must call the same steps in the same order, with equal shapes. If one loads "
        "data or evaluates alone for longer, give jaxsparse.fail_at_once(limit=...) more seconds"
    )


def _difference(group: ProcessGroup, theirs: list[str], mine: list[str]) -> str:
    """What differs first. Lines are a step's name, and digest and text of each of its parts."""

    def unknown(lines: list[str], others: list[str]) -> list[str]:
        known = {line.partition(" ")[0] for line in others[1:]}
        split = [line.partition(" ") for line in lines[1:]]
        return [text for digest, _, text in split if digest not in known]

    def only(texts: list[str]) -> str:
        files = dict.fromkeys(re.findall(r"([^/\s]+\.py):", "\n".join(texts)))
        rest = f" (and {len(texts) - 1} more, in {', '.join([*files][:_FILES])})" if files else ""
        return texts[0] + rest if texts else "nothing else"

    first, me = group.members[0], jax.process_index()
    ours, others = unknown(mine, theirs), unknown(theirs, mine)
    # A program has no settings, such as a format, and all that follows from a difference differs.
    place = next((text for text in ours if ".py:" in text), "")
    is_exchange = any(room in place for room in _EXCHANGES)
    advice = "Exchanges differ in reducer or settings (format, density). " if is_exchange else ""
    return (
        f"process {me} calls {mine[0]!r} and process {first} calls {theirs[0]!r}, which differ. "
        f"Process {me} has: {only(ours)}. Process {first} has: {only(others)}. {advice}Start "
        "all processes with the same code, settings and seeds, and from the same checkpoint. "
        "Values that are to differ belong in a batch, of as many rows in each process, or in a "
        "PerWorker array."
    )
