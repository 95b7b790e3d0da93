"""Checks that checkpoints of older code are read. This module restores a committed checkpoint and trains on from it."""

import hashlib
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import runs

from zerojax import tree
from zerojax.checkpoint import logical

# The checkpoint was written before modules moved into packages. expected.json holds the results of that code: the state's bytes, and the
# losses of two more steps at each stage.
OLD_RUN = runs.ROOT / "tests" / "golden" / "checkpoint_v0"
OLD_SETTINGS = {"precision": "bf16", "seq_len": 16}
EXPECTED = json.loads((OLD_RUN / "expected.json").read_text())
OTHER_CPU = 1e-3  # relative: bfloat16 sums in the order of another processor's vectors; on one like it losses are equal bit for bit


pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.mark.parametrize("stage", runs.cases(range(4), long=(0, 1, 2)))
def test_a_checkpoint_of_older_code_restores_bit_for_bit_and_trains_on_at_every_stage(tmp_path, capsys, stage):
    folder = pathlib.Path(shutil.copytree(OLD_RUN, tmp_path / "run"))
    _, state = runs.restored(folder, 3, zero__stage=stage, **OLD_SETTINGS)
    found = {path: digest(leaf) for path, leaf in tree.flatten(logical.to_logical(state))}
    assert found == EXPECTED["sha256"]
    runs.run(folder, steps=5, zero__stage=stage, **OLD_SETTINGS)
    assert "checkpoint 3 was saved without checksums" in capsys.readouterr().out
    losses = [runs.losses(folder)[step] for step in (4, 5)]
    np.testing.assert_allclose(losses, EXPECTED["losses_of_steps_4_and_5_by_stage"][str(stage)], rtol=OTHER_CPU)


def digest(leaf):
    """Returns the beginning of a leaf's SHA-256."""
    array = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()[:16]
