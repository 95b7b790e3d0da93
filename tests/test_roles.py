from zerojax import roles


def test_no_two_roles_have_one_word():
    words = [value for name, value in vars(roles).items() if name.isupper() and isinstance(value, str)]
    assert len(words) == len(set(words))


def test_roles_that_are_grouped_are_roles():
    words = {value for name, value in vars(roles).items() if name.isupper() and isinstance(value, str)}
    assert {*roles.TEMPORARY, *roles.SENT, *roles.WORDS} <= words
    assert set(roles.SENT_OF_WEIGHTS) < set(roles.SENT)
