"""Checks the table of families. This module tests zerojax.models.families."""

from zerojax.models import families


def test_no_two_families_have_a_preset_of_one_name():
    assert len(families.PRESETS) == sum(len(family.presets) for family in families.FAMILIES)
    for preset, family in families.PRESETS.items():
        assert preset in family.presets
