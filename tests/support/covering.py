"""Covering arrays: rows of settings in which every pair of values of any two settings meets. This module makes them, under rules."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import allpairspy

Row = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Values that do not go together: the settings that the rule reads, whether a row breaks it, and words of the line that says so."""

    settings: tuple[str, ...]
    breaks: Callable[[Row], bool]
    words: str


def never(words: str, **values: str | tuple[str, ...]) -> Rule:
    """Returns the rule that these values do not go together."""
    sets = {name: (value,) if isinstance(value, str) else value for name, value in values.items()}
    return Rule(tuple(sets), lambda row: all(row[name] in found for name, found in sets.items()), words)


@dataclasses.dataclass(frozen=True)
class Space:
    """Settings that are crossed.

    Attributes:
      settings: setting -> the names of its values, the plainest first.
      rules: what no row may hold.
      together: settings each combination of whose values meets every value of the others.
    """

    settings: Mapping[str, Sequence[str]]
    rules: Sequence[Rule] = ()
    together: tuple[str, ...] = ()

    @functools.cached_property
    def factors(self) -> dict[str, list[tuple[str, ...]]]:
        """Returns the values that meet in pairs, as tuples: those of each setting, and the combinations of `together`."""
        joint = {"+".join(self.together): list(itertools.product(*(self.settings[name] for name in self.together)))}
        alone = {
            name: [(value,) for value in found] for name, found in self.settings.items() if name not in self.together
        }
        return (joint if self.together else {}) | alone

    @property
    def plain(self) -> Row:
        """Returns the first value of each setting."""
        return {name: values[0] for name, values in self.settings.items()}

    def pairs(self, row: Row) -> set[frozenset]:
        """Returns the pairs of values of `factors` that meet in a row."""
        there = [(name, tuple(row[setting] for setting in name.split("+"))) for name in self.factors]
        return set(map(frozenset, itertools.combinations(there, 2)))

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """Returns rows that break no rule and hold every pair of values of `factors` that a row can hold; the same ones each time.

        The generator drops a pair if the rules refuse what it chose for the rest of the row. Further rows hold those pairs.
        """
        names = sorted(self.factors, key=lambda name: -len(self.factors[name]))
        place = {setting: at for at, name in enumerate(names) for setting in name.split("+")}
        due: dict[int, list[Rule]] = {}
        for rule in self.rules:
            due.setdefault(max(place[name] for name in rule.settings), []).append(rule)

        def is_allowed(begun: Sequence[tuple]) -> bool:
            return not any(rule.breaks(_joined(names, begun)) for rule in due.get(len(begun) - 1, ()))

        made = allpairspy.AllPairs([self.factors[name] for name in names], filter_func=is_allowed)
        found = [_joined(names, row) for row in made]
        there = {pair for row in found for pair in self.pairs(row)}
        left = [values for pair, values in self.all_pairs() if pair not in there and self.completed(values) is not None]
        while left:
            fixed: Row = {}
            for pair in left:
                both = {**fixed, **pair}
                if both == {**pair, **fixed} and self.completed(both) is not None:
                    fixed = both
            found.append(self.completed(fixed) or {})
            left = [pair for pair in left if not pair.items() <= found[-1].items()]
        return tuple({name: row[name] for name in self.settings} for row in found)

    def all_pairs(self) -> Iterable[tuple[frozenset, Row]]:
        """Yields each pair of values of `factors`, as in `pairs` and as a part of a row."""
        for names in itertools.combinations(self.factors, 2):
            for values in itertools.product(*(self.factors[name] for name in names)):
                yield frozenset(zip(names, values)), _joined(names, values)

    def completed(self, fixed: Row, but: Rule | None = None, row: Row | None = None) -> Row | None:
        """Returns a row with the given values that breaks no rule (`but` may be broken), or None if there is none.

        A row that breaks a rule must differ in a setting that the rule reads: each of these is tried with each of its other values.
        """
        row = {**(row or self.plain), **fixed}
        rule = next((rule for rule in self.rules if rule is not but and rule.breaks(row)), None)
        if rule is None:
            return row
        for name in rule.settings:
            if name not in fixed:
                for value in self.settings[name]:
                    if value != row[name] and (found := self.completed({**fixed, name: value}, but, row)) is not None:
                        return found
                fixed = {**fixed, name: row[name]}  # further branches keep it
        return None

    def breaking(self, rule: Rule) -> Row:
        """Returns a row that breaks one rule alone."""
        for values in itertools.product(*(self.settings[name] for name in rule.settings)):
            fixed = dict(zip(rule.settings, values))
            if rule.breaks(fixed) and (row := self.completed(fixed, rule)) is not None:
                return row
        raise AssertionError(f"{rule.settings}: the other rules refuse all that this one refuses; delete it")


def _joined(names: Iterable[str], values: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Returns a row, or a part of one, from values of `factors`."""
    return {setting: value for name, found in zip(names, values) for setting, value in zip(name.split("+"), found)}
