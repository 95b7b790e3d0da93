from zerojax.plan import picture


def test_the_picture_is_a_png(plan, tmp_path):
    picture.draw(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
