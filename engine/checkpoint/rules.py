"""What a config declares about quantisation, and whether the headers agree.

The headers decide how a module is read; the config must agree about the trunk, or the checkpoint is refused: one of
the two is wrong, and a guess would serve garbage. The head goes by its headers alone: writers' configs cover the
classes they loaded, which have no head, and heads are added to other people's packs. So does the question whether
lm_head is packed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import translate
from functools import cached_property

from pilotfish.engine.checkpoint.expressions import Deadline
from pilotfish.engine.checkpoint.inventory import PACKABLE_KINDS, Inventory, Kind
from pilotfish.engine.checkpoint.layouts import FP8_BLOCK, FP8_BLOCKS, PACKED, Layout, Module
from pilotfish.engine.checkpoint.names import is_mtp
from pilotfish.engine.errors import LayoutError


class Style(Enum):
    """How a writer's patterns are meant."""

    EXACT = "compressed-tensors: whole names, or `re:` expressions that match from the start"
    GLOB = "ModelOpt: whole names or globs; a container covers what lies in it"
    PART = "fp8: dotted parts of names, wherever they stand, or expressions that match from the start up to a dot"


@dataclass(frozen=True)
class QuantGroup:
    """Modules that fit a target are stored in one of `layouts`."""

    targets: tuple[str, ...]
    layouts: frozenset[Layout]


@dataclass(frozen=True)
class QuantRules:
    """Which layout the config gives each module: that of the group it fits best, unless it is ignored.

    `exhaustive`: a module that a group covers and that is stored plain contradicts the config, unless it is
    `optional`.
    """

    groups: tuple[QuantGroup, ...]
    ignore: tuple[str, ...] = ()
    style: Style = Style.EXACT
    exhaustive: bool = True
    optional: frozenset[str] = frozenset()

    def layouts(self, names: Iterable[str], kind: Kind) -> frozenset[Layout] | None:
        """Any of these is meant for a module known by these names; None: it is meant to be plain."""
        names = tuple(names)
        classes = ("Linear",) if kind in PACKABLE_KINDS else ("FusedExperts",) if kind is Kind.FUSED_EXPERTS else ()
        # Expressions such as `.*linear_attn.*` fit convolutions and norms too, which no writer packs.
        if not classes or self._ignored.first((*names, *classes)) is not None:
            return None
        # By name before by class: a group for some names is meant to differ from the one for all others.
        for wanted in (names, classes):
            if (group := self._targeted.first(wanted)) is not None:
                return self.groups[group].layouts
        return None

    @cached_property
    def _ignored(self) -> _Patterns:
        return _Patterns([self.ignore], self.style)

    @cached_property
    def _targeted(self) -> _Patterns:
        return _Patterns([group.targets for group in self.groups], self.style)

    def may_be_plain(self, name: str, kind: Kind) -> bool:
        """Though a group covers it. Whether a router counts as a Linear differs between versions of the model class."""
        return not self.exhaustive or kind is Kind.ROUTER or name in self.optional


def matches(patterns: Iterable[str], names: Iterable[str], style: Style = Style.EXACT) -> bool:
    """Whether a pattern fits one of the names."""
    return _Patterns([patterns], style).first(names) is not None


class _Patterns:
    """Lists of patterns, looked up by name: a config may name each of a model's 31 000 experts, or all but those."""

    def __init__(self, lists: Iterable[Iterable[str]], style: Style):
        self._style, self._deadline = style, Deadline()
        self._literals: dict[str, int] = {}
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        for number, patterns in enumerate(lists):
            for pattern in patterns:
                expressions = _expressions(pattern, style)
                if not expressions or style is Style.PART:
                    self._literals.setdefault(pattern, number)
                self._expressions += [(number, re.compile(expression)) for expression in expressions]
        self._beginnings = {pattern.split(".", 1)[0] for pattern in self._literals}

    def first(self, names: Iterable[str]) -> int | None:
        """The number of the first list of which a pattern fits one of the names."""
        fits: set[int] = set()
        for name in names:
            fits.update(self._literals[part] for part in self._parts(name) if part in self._literals)
            fits.update(number for number, expression in self._expressions if self._deadline.match(expression, name))
        return min(fits, default=None)

    def _parts(self, name: str) -> Iterator[str]:
        """What of a name a literal pattern can be equal to."""
        if self._style is Style.EXACT:
            yield name
            return
        words = name.split(".")
        for begin, word in enumerate(words if self._style is Style.PART else words[:1]):
            if word in self._beginnings:
                yield from (".".join(words[begin:end]) for end in range(begin + 1, len(words) + 1))


def _expressions(pattern: str, style: Style) -> list[str]:
    """Regular expressions that fit from the start on, for what is more than a literal name."""
    if style is Style.EXACT:
        return [pattern.removeprefix("re:")] if pattern.startswith("re:") else []
    if style is Style.GLOB:
        return [translate(pattern), re.escape(pattern) + r"\."] if re.search(r"[*?[]", pattern) else []
    # a dot between words stands for itself, as in the names that writers list
    return [] if re.fullmatch(r"[\w-]+(?:\.[\w-]+)*", pattern) else [rf"(?:{pattern})(?:\.|$)"]


def check_agreement(rules: QuantRules | None, modules: Mapping[str, Module], inventory: Inventory) -> None:
    """Raises LayoutError naming the first module of which headers and config say different things.

    Not of lm_head where the config has it otherwise, packed or plain: writers list it by habit (official ModelOpt packs
    exclude `lm_head*` and store it packed), and its tensors leave no doubt. How it is packed must be what is declared.
    """
    for name, module in modules.items():
        if is_mtp(name):
            continue
        kind = inventory[name].kind
        declared = rules.layouts(_spellings(module), kind) if rules is not None else None
        if name == "lm_head" and rules is not None and (declared is None) is (module.layout in PACKED):
            continue
        if module.layout in PACKED:
            _check_packed(module, declared, has_rules=rules is not None)
        elif declared and rules is not None and not rules.may_be_plain(name, kind):
            raise LayoutError(f"{module.raw_name}: stored plain ({module.dtype}), but config.json has it quantised")


def _check_packed(module: Module, declared: frozenset[Layout] | None, has_rules: bool) -> None:
    stored = f"{module.raw_name}: stored as {module.layout.value}"
    if declared is None:
        why = "leaves it unquantised" if has_rules else "has no quantization_config"
        raise LayoutError(f"{stored}, but config.json {why}")
    if module.layout not in declared and not _is_same(module, declared):
        wanted = " or ".join(sorted(layout.value for layout in declared))
        raise LayoutError(f"{stored}, but config.json has it as {wanted}")


def _is_same(module: Module, declared: frozenset[Layout]) -> bool:
    """Whether one scale is all that a declared FP8 layout has for a matrix of this size."""
    one_block = max(module.shape) <= FP8_BLOCK and bool(declared & FP8_BLOCKS)
    one_row = module.shape[0] == 1 and Layout.FP8_CHANNEL in declared
    return module.layout is Layout.FP8_TENSOR and (one_block or one_row)


def _spellings(module: Module) -> tuple[str, ...]:
    """The names a pattern may know it by: the file's, the text-only one, the wrapper's."""
    wrapped = module.name.replace("model.", "model.language_model.", 1) if module.name.startswith("model.") else ""
    return tuple(dict.fromkeys(name for name in (module.raw_name, module.name, wrapped) if name))
