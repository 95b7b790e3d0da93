"""Checks the built-in reviews. This module tests zerojax.data.short_reviews."""

from zerojax.data import short_reviews, source


def test_splits_hold_every_sentence_once_with_its_label_and_validation_has_no_new_word(tmp_path):
    source.prepare("short_reviews", tmp_path)
    assert source.class_names("short_reviews", tmp_path) == {"label": list(short_reviews.LABELS)}
    read = {}
    for split in ("train", "validation"):
        opened = source.open_source("short_reviews", split, tmp_path)
        read[split] = {opened[i]["text"].decode(): short_reviews.LABELS[opened[i]["label"]] for i in range(len(opened))}
    train, validation = read["train"], read["validation"]
    assert not train.keys() & validation.keys()
    assert train | validation == dict(short_reviews.sentences()) and len(validation) > 100
    assert {word for text in validation for word in text.split()} <= {word for text in train for word in text.split()}
    for part in (train, validation):
        share = list(part.values()).count("positive") / len(part)
        assert 0.45 < share < 0.55
