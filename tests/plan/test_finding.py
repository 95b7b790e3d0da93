from zerojax.plan import finding


def test_a_list_names_the_costliest_and_counts_the_rest():
    assert finding.listed({"a": 1, "b": 5, "c": 3}) == "b, c, a"
    assert finding.listed({"a": 1, "b": 5, "c": 3, "d": 2, "e": 0}) == "b, c, d and 2 more"
