"""Checks the table of model types. This module tests zerojax.models.llama.model_types."""

import dataclasses

from zerojax.models.llama import config_file
from zerojax.models.llama.model_types import ROWS


def test_rows_fix_fields_of_parts():
    for row in ROWS.values():
        for name, fields in row.parts.items():
            assert fields.keys() <= {field.name for field in dataclasses.fields(config_file.PARTS[name])}
