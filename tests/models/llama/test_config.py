"""Checks what a config says of its layers. This module tests zerojax.models.llama.config."""

from zerojax.models.llama import family as presets
from zerojax.models.rope import Rope

CONFIG = presets.PRESETS["moe_test"]


def test_changed_fields_of_a_part_leave_its_others_and_other_parts():
    found = CONFIG.changed(heads={"windows": (8, 0)}, mixture={"dense_layers": (1,)})
    assert found.heads.norm == "each" and found.mixture.experts == 4 and found.norms == CONFIG.norms
    assert [found.window_of(layer) for layer in range(3)] == [8, 0, 8]
    assert [found.has_experts(layer) for layer in range(3)] == [True, False, True]


def test_layers_with_a_window_may_have_a_rotation_of_their_own_and_others_none():
    near, far = Rope(1e4), Rope(CONFIG.rotation.theta)
    found = CONFIG.changed(heads={"windows": (8, 0, 0)}, rotation={"in_windows": near, "layers": (True, True, False)})
    assert [found.rope_of(layer) for layer in range(4)] == [near, far, None, near]
    assert len({found.kind_of(layer) for layer in range(6)}) == 3
