import dataclasses

from zerojax.clock import kernels, walk
from zerojax.plan import picture


def test_the_picture_is_a_png_and_has_the_time_of_a_step_where_it_is_foretold(plan, tmp_path):
    spans = (
        walk.Span(kernels.MATMUL, 0.0, 2.0),
        walk.Span(kernels.COLLECTIVE, 1.0, 3.0, links=(walk.NEAR, walk.FAR)),
        walk.Span(kernels.TO_HOST, 1.0, 4.0, links=(kernels.TO_HOST,)),
    )
    foretold = walk.StepTime(4.0, dict.fromkeys(walk.PARTS, 1.0), {}, spans)
    sizes = []
    for own in (plan, dataclasses.replace(plan, foretold=foretold)):
        picture.draw(own, tmp_path / "plan.png")
        written = (tmp_path / "plan.png").read_bytes()
        assert written.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(written[20:24], "big"))
    assert sizes[1] > sizes[0], "a row of axes more"
