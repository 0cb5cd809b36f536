"""What a compiled kernel touches before it has waited for the kernel before it (griddepcontrol.wait), by its PTX.

Of two kernels chained by programmatic dependent launch the second may run while the first still does. Until its wait it
may read what no kernel writes, and write nothing; and one of its programs must wait, or the kernel after it could run
while the one before it does.
"""

from __future__ import annotations

import re
from typing import Any

from tests.support.ptx import _parsed

Access = tuple[str, frozenset[str]]
"""An operation on device memory, and the arguments that its address was made from."""


class Waits:
    """early: accesses that some way through the kernel makes without a wait before them. leaves_early: a way to the end
    has no wait. triggers_early: the kernel after this one may start before this one has waited."""

    def __init__(self, kernel: Any):
        code = _parsed(kernel.asm["ptx"])
        self.instructions, self.labels = code.instructions, code.labels
        names = list(argument_names(kernel))
        self._pointers(names)
        waited = self._waited()
        self.early: set[Access] = set()
        self.num_waits = self.num_triggers = 0
        self.leaves_early = self.triggers_early = False
        for at, (_, _, op, operands) in enumerate(self.instructions):
            kind = ".".join(op)
            self.num_waits += kind == "griddepcontrol.wait"
            if kind == "griddepcontrol.launch_dependents":
                self.num_triggers += 1
                self.triggers_early |= not waited[at]
            if waited[at] is not False:
                continue
            self.leaves_early |= op[0] in ("ret", "exit")
            if "global" in op and op[0] in ("ld", "st", "atom", "red", "cp"):
                # of a copy to shared memory the second address
                where = [part for part in operands if part.startswith("[")][op[0] == "cp"]
                self.early.add((op[0], self.origin.get(_register(where), frozenset())))

    def _pointers(self, names: list[str]) -> None:
        """For each register, the pointer arguments that arithmetic made it from; what is loaded has none."""
        self.origin: dict[str, frozenset[str]] = {}
        changed = True
        while changed:
            changed = False
            for _, _, op, operands in self.instructions:
                if not operands or op[0] in ("st", "bra", "bar", "griddepcontrol"):
                    continue
                found = re.search(r"_param_(\d+)", operands[-1]) if op[:2] == ["ld", "param"] else None
                if found is not None:
                    name = names[int(found[1])] if int(found[1]) < len(names) else "scratch"
                    made = frozenset([name]) if op[-1] in ("u64", "b64") else frozenset()
                elif op[0] in ("ld", "atom"):
                    continue
                else:
                    sources = [_register(part) for operand in operands[1:] for part in operand.strip("{}").split(",")]
                    made = frozenset().union(*(self.origin.get(source, frozenset()) for source in sources))
                for target in operands[0].strip("{} ").split(","):
                    before = self.origin.get(target.strip(), frozenset())
                    if not made <= before:
                        self.origin[target.strip()] = before | made
                        changed = True

    def _waited(self) -> list[bool | None]:
        """Before each instruction: whether every way to it has waited; None where there is no way."""
        end = len(self.instructions)
        state: list[bool | None] = [None] * (end + 1)
        todo = [(0, False)]
        while todo:
            at, has_waited = todo.pop()
            before = state[at]
            after = has_waited if before is None else before and has_waited
            if after == before or at == end:
                continue
            state[at] = after
            predicate, _, op, operands = self.instructions[at]
            after = after or ".".join(op) == "griddepcontrol.wait"
            if op[0] == "bra":
                todo.append((self.labels[operands[0]], after))
            if op[0] not in ("bra", "ret", "exit") or predicate is not None:
                todo.append((at + 1, after))
        return state


def _register(operand: str) -> str:
    return operand.strip("[] ").partition("+")[0].strip()


def argument_names(kernel: Any) -> Any:
    """Of the arguments that are passed, in order; of a tuple's elements its own name."""

    def flat(name: str, kind: Any) -> Any:
        if isinstance(kind, tuple):
            for part in kind:
                yield from flat(name, part)
        elif kind != "constexpr":
            yield name

    for name, kind in kernel.src.signature.items():
        yield from flat(name, kind)
