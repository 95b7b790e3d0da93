"""Checks what follows from documents that cannot be read. This module tests zerojax.data.damaged."""

import pytest

from zerojax.data import batches, damaged, tokenizer
from zerojax.errors import UserError

BYTES = tokenizer.ByteTokenizer()


class Source(list):
    def __getitem__(self, index):
        if super().__getitem__(index) is None:
            raise UserError(f"data.jsonl:{index + 1}: is not JSON; mend or remove that line")
        return super().__getitem__(index)


TEXTS = Source([{"text": "a"}, None, {"text": "bc"}, None])


def test_a_document_that_cannot_be_read_ends_the_run_with_its_line_and_the_ways_out():
    with pytest.raises(
        UserError, match=r"^data.jsonl:2: is not JSON; mend or remove that line; or set `on_bad=skip` to go on"
    ):
        damaged.Readable(TEXTS, "text", damaged.Damaged())[1]


def test_documents_that_are_skipped_have_no_tokens_and_are_counted_once():
    counted = damaged.Damaged(damaged.SKIP)
    source = damaged.Readable(TEXTS, "text", counted)
    sizes = {"rows": [0], "num_rows": 1, "seq_len": 4, "seed": 0}
    made = batches.make_batches(source, BYTES, text_key="text", shuffle=False, **sizes)
    separator = BYTES.bos_id
    for _ in range(3):
        assert next(made)["tokens"].tolist() == [[separator, ord("a"), separator, ord("b"), ord("c")]]
    made.close()
    assert counted.summary() == [
        "documents that could not be read and were skipped since the start: 2; the first of process 0: data.jsonl:2: is not JSON"
    ]
    assert damaged.Damaged(damaged.SKIP).summary() == [] and damaged.Damaged().summary() == []


def test_the_place_of_a_document_is_asked_for_where_it_is_told_alone():
    asked = []

    class Placed(Source):
        def place(self, index):
            asked.append(index)
            return f"file:{index}"

    counted, source = damaged.Damaged(damaged.SKIP), Placed(TEXTS)
    for index in range(4):
        counted.add(index, source, index, UserError(f"{damaged.HERE}: has no text; name another field"))
    assert asked == [0] and counted.summary()[0].endswith(
        "skipped since the start: 4; the first of process 0: file:0: has no text"
    )
