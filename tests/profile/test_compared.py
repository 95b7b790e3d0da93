import pytest

from zerojax.clock import kernels, walk
from zerojax.profile import breakdown, compared, phases

SCOPES = {
    "jit(f)/gradients/jvp(f)/layer_0/mlp/dot": kernels.MATMUL,
    "jit(f)/gradients/jvp(f)/loss/dot": kernels.MATMUL,
    "jit(f)/update/add": kernels.ELEMENTWISE,
    "jit(f)/gradients/layer_0/mlp/mul": kernels.ELEMENTWISE,
}


@pytest.fixture
def step():
    spans = tuple(walk.Span(kind, n, n + 1, name, times=2) for n, (name, kind) in enumerate(SCOPES.items()))
    spans += (walk.Span(kernels.COLLECTIVE, 0, 100),)  # most of it is hidden
    parts = dict.fromkeys(walk.PARTS, 0.0) | {kernels.MATMUL: 4, kernels.ELEMENTWISE: 4, walk.EXPOSED: 3, walk.GAPS: 1}
    return walk.StepTime(12, parts, {kernels.COLLECTIVE: 100}, spans)


def test_the_foretold_time_of_all_phases_is_that_of_the_step(step):
    found = compared.foretold(step)
    assert sum(found.values()) == step.seconds
    names = (phases.MATMULS, phases.LOSS, phases.OPTIMIZER, phases.OTHER, phases.COLLECTIVES, phases.IDLE)
    assert [found[name] for name in names] == [2, 2, 2, 2, 3, 1]


def test_the_phase_that_differs_most_is_named(step):
    measured = {name: phases.Share(seconds, 0, 1) for name, seconds in compared.foretold(step).items()}
    measured[phases.LOSS] = phases.Share(7.0, 0, 1)
    profile = breakdown.Profile(1, 1, 1, 17, measured, {}, (), 1.0)
    assert compared.largest(profile, step) == (phases.LOSS, 2, 7.0)
    told = compared.line(profile, step, compared.largest(profile, step))
    assert (
        "12,000.0 ms on a device and took 17,000.0; most differs loss and head: foretold 2,000.0 ms, measured 7,000.0"
        in told
    )


def test_of_a_pipeline_the_step_is_compared_and_no_phase():
    found = walk.StepTime(12, {"passes of stages": 10, "bubble": 2}, {})
    profile = breakdown.Profile(1, 1, 1, 17, {phases.MATMULS: phases.Share(7.0, 0, 1)}, {}, (), 1.0)
    assert compared.largest(profile, found) is None
    assert compared.line(profile, found, None).endswith("12,000.0 ms on a device and took 17,000.0")
