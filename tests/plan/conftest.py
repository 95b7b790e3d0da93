import pytest
import runs

from zerojax.trainer import plans


@pytest.fixture(scope="session")
def plan():
    """Plans a small step at stage 3 once, for all tests of a plan's output formats."""
    return plans.plan_config(runs.config(zero__stage=3, model__vocab_size=320), "cpu", "1x8")
