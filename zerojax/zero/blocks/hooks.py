"""Runs beside a model's modules what a step adds to them. This module says what such an addition, a hook, has to tell the step.

A hook may read values of the train state and renew them, as histories of magnitudes are. The loss is then differentiated with respect to
them too, and their gradient tells what was seen: over devices and passes it is the largest.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zerojax.train_state import State


class Hook:
    """What a step adds to the modules of a model. This one adds nothing, and has no values."""

    def inputs(self, state: State) -> Mapping[str, Any]:
        """Returns the values of a train state that it reads, in a form whose paths are `placement.is_overwritten`."""
        return {}

    def known(self, inputs: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Makes values, as `inputs` or `of_block` return them, known to the modules that are traced inside."""
        return contextlib.nullcontext()

    def of_block(self, weights: Collection[str]) -> Mapping[str, Any]:
        """Returns those of the known values that a block with these weights reads: a block has them as inputs."""
        return {}

    def are_alike(self, first: str, path: str) -> bool:
        """Returns whether it does the same in a block at `path` as it did in one at `first`, if both call the same modules."""
        return False

    def renewed(self, state: State, seen: Mapping[str, Any]) -> dict[str, Any]:
        """Returns fields of the state after a step, from the gradient of `inputs`."""
        return {}


Hooks = Sequence[Hook]
