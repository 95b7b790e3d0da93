"""Says what one defect of a compiled train step is, and what rules look at. This module is shared by the rules."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerojax.plan import ledger as ledger_lib

SHARE = 0.01  # of the parameters, or of the state's bytes: less is not worth a line
_NAMED = 3  # leaves a finding names before it counts the rest


@dataclasses.dataclass(frozen=True)
class Finding:
    """One defect: the rule it breaks, where, how much it costs a device (bytes a step sent, or bytes held), and the way out."""

    rule: str
    where: str
    amount: str
    remedy: str
    nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """What the rules look at."""

    ledger: ledger_lib.Ledger
    planned: Mapping[str, Any]
    is_16_bit: bool
    passes: int

    @property
    def rows(self) -> tuple[ledger_lib.Row, ...]:
        return self.ledger.rows

    @property
    def is_cpu(self) -> bool:
        return self.ledger.mesh.devices.flat[0].platform == "cpu"


def listed(named: Mapping[str, int]) -> str:
    """Returns the names that cost most, and how many more there are."""
    first = sorted(named, key=lambda name: -named[name])[:_NAMED]
    rest = len(named) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest else "")
