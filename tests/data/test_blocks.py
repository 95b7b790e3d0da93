"""Checks that the blocks of files together have each document once. This module tests zerojax.data.blocks."""

import json
import random

import fsspec
import hypothesis
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st

from zerojax.data import blocks, locations
from zerojax.data.pairs import records
from zerojax.errors import UserError

EXAMPLES = hypothesis.settings(max_examples=40, deadline=None)


def documents(opened):
    return [block[index] for block in (opened[number] for number in range(len(opened))) for index in range(len(block))]


def places(opened):
    return [
        block.place(index) for block in (opened[number] for number in range(len(opened))) for index in range(len(block))
    ]


@pytest.fixture
def small(monkeypatch):
    """Blocks of a few bytes."""

    def of(size):
        monkeypatch.setattr(blocks, "_LEAST", size)
        monkeypatch.setattr(blocks, "_LEAST_REMOTE", size)
        monkeypatch.setattr(blocks, "_MOST", size)
        monkeypatch.setattr(blocks, "_TAIL", max(1, size // 2))

    return of


@EXAMPLES
@hypothesis.given(
    texts=st.lists(st.text("ab\u00e9 ", max_size=30), min_size=1, max_size=30),
    size=st.integers(1, 120),
    ends=st.booleans(),
    blank=st.integers(0, 3),
)
def test_blocks_of_any_size_have_each_line_of_json_once_in_order_with_its_number(
    texts, size, ends, blank, tmp_path_factory
):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = []
    for number, text in enumerate(texts):
        lines += [
            json.dumps({"text": text}, ensure_ascii=False),
            *["" if blank % 2 else " \r"] * (number % (blank + 1)),
        ]
    path.write_text("\n".join(lines) + ("\n" if ends else ""), encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_LEAST", "_MOST", "_TAIL"):
            patched.setattr(blocks, name, size)
        opened = blocks.open_files(str(path), "train_file", 1)
        assert [document["text"] for document in documents(opened)] == texts
        assert places(opened) == [f"{path}:{number}" for number, line in enumerate(lines, 1) if line.strip()]


@EXAMPLES
@hypothesis.given(
    cells=st.lists(st.lists(st.text('ab",\n\u00e9', max_size=12), min_size=2, max_size=2), min_size=1, max_size=30),
    size=st.integers(1, 120),
    grain=st.integers(1, 50),
    suffix=st.sampled_from([".csv", ".tsv"]),
)
def test_blocks_of_a_table_have_each_row_once_as_it_is_read_whole(cells, size, grain, suffix, tmp_path_factory):
    path, mark = tmp_path_factory.mktemp("table") / f"a{suffix}", {".csv": ",", ".tsv": "\t"}[suffix]
    rows = [["text", "label"], *cells]
    quoted = (mark.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows)
    path.write_text("".join(row + "\n" for row in quoted), encoding="utf-8", newline="")
    whole = records.Files(str(path), "train_file")
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_LEAST", "_MOST"):
            patched.setattr(blocks, name, size)
        patched.setattr(blocks, "_GRAIN", grain)
        for fine in (0, 2**20):  # with a row in some bytes known, or each
            patched.setattr(blocks, "_FINE", fine)
            opened = blocks.open_files(str(path), "train_file", 1)
            assert documents(opened) == [whole[index] for index in range(len(whole))]
            assert places(opened) == [whole.place(index) for index in range(len(whole))]


@pytest.mark.parametrize("size", [64, 1000, 10**6])
def test_blocks_of_parquet_have_each_row_once_and_only_the_columns_that_are_read(tmp_path, monkeypatch, size):
    monkeypatch.setattr(blocks, "HELD", size)
    rows = [{"text": "x" * (number % 50), "other": number} for number in range(700)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=300)
    opened = blocks.open_files(str(path), "train_file", 1)
    assert documents(opened) == rows
    assert places(opened) == [f"{path}:row {number}" for number in range(1, 701)]
    assert (len(opened) == 3) == (size == 10**6), "a row group, or a part of one"
    texts = blocks.open_files(str(path), "train_file", 1, columns=["text"])
    assert documents(texts) == [{"text": row["text"]} for row in rows]
    without = blocks.open_files(str(path), "train_file", 1, columns=["missing"])
    assert set(without[0][0]) == {"text", "other"}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_files_elsewhere_have_the_documents_of_files_here(tmp_path, small, suffix):
    small(100)
    rows = [{"text": f"document {number}"} for number in range(50)]
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == ".csv":
        path.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    system = fsspec.filesystem("memory")
    system.pipe(f"/there/a{suffix}", path.read_bytes())
    here, there = (blocks.open_files(pattern, "train_file", 1) for pattern in (str(path), f"memory://there/*{suffix}"))
    assert documents(there) == documents(here) == rows
    assert len(there) == len(here) > (suffix == ".parquet")
    assert [place.rpartition(":")[2] for place in places(there)] == [place.rpartition(":")[2] for place in places(here)]
    read = [block if isinstance(block, UserError) else len(block) for block in there.several(range(len(there)))]
    assert read == [len(here[number]) for number in range(len(here))]


def test_files_are_in_the_order_of_their_names_and_blocks_belong_to_one_file(tmp_path, small):
    small(40)
    for name in "ba":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{i}"}) + "\n" for i in range(9)))
    opened = blocks.open_files(f"{tmp_path}/*.jsonl", "train_file", 1)
    assert [document["text"] for document in documents(opened)] == [f"{name}{i}" for name in "ab" for i in range(9)]


def test_the_text_that_rows_hold_is_bounded_whatever_their_number(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.truncate(2**30)  # of zeros
    for rows in (1, 32, 1024, 2**14):
        opened = blocks.open_files(str(path), "train_file", rows)
        size = -(-(2**30) // len(opened))
        assert rows * opened.group * size <= max(blocks.HELD, rows * opened.group * blocks._LEAST)
        assert len(opened) >= rows * opened.group, "each row has a group of its own"


def test_the_index_of_a_table_is_kept_and_made_again_for_another_file(tmp_path, small, monkeypatch):
    small(64)
    monkeypatch.setattr(blocks, "_FINE", 0)
    path, cache = tmp_path / "a.csv", tmp_path / "cache"
    path.write_text("text\n" + "one\n" * 50)
    first = documents(blocks.open_files(str(path), "train_file", 1, cache=cache))
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "_Counted", None)  # what reads a table whole
        assert documents(blocks.open_files(str(path), "train_file", 1, cache=cache)) == first
    path.write_text("text\n" + "two\n" * 49)
    assert documents(blocks.open_files(str(path), "train_file", 1, cache=cache)) == [{"text": "two"}] * 49


@pytest.mark.parametrize("name, content, line", [
    ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: is not JSON"),
    ("a.jsonl", b'{"text": "a"}\n\n["b"]\n', r"a\.jsonl:3: is \['b'\], and an example has named fields"),
    ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: is not UTF-8"),
    ("a.csv", b"text,label\na,b\na\n", r"a\.csv:3: has 1 values, and line 1 names 2 fields"),
    ("a.csv", b'text,label\n"a,b\n', r"a\.csv:2: is no row of a table"),
    ("a.csv", b"text,text\na,b\n", r"a\.csv:1: names the fields"),
    ("a.csv", b"text\na\n\xff\n", r"a\.csv:3: is not UTF-8"),
    ("a.parquet", b"PAR1 damaged", r"a\.parquet: cannot be read as parquet"),
    ("a.jsonl", b"", r"^train_file: .* has no examples"),
    ("a.csv", b"text\n", r"^train_file: .* has no examples"),
    ("a.jsonl.gz", b"\x1f\x8b", r"^train_file: .*a\.jsonl\.gz is compressed, and has no place where a part of it begins"),
    ("a.txt", b"text", r"^train_file: .*a\.txt is not one of \.jsonl"),
])  # fmt: skip
def test_a_damaged_file_is_one_line_with_file_and_number(tmp_path, name, content, line):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=line):
        documents(blocks.open_files(str(tmp_path / name), "train_file", 4))


def test_a_line_without_end_is_refused_and_not_held(tmp_path, small, monkeypatch):
    small(100)
    monkeypatch.setattr(records, "MOST_LINE", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"x" * 5000)
    with pytest.raises(UserError, match=r"a\.jsonl:2: has more than 1000 bytes"):
        documents(blocks.open_files(str(path), "train_file", 1))


def test_a_block_far_inside_of_a_file_is_read_without_what_is_before(tmp_path, small, monkeypatch):
    small(1000)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number:06d}"}) + "\n" for number in range(10_000)))
    read, plain = [], locations.read
    monkeypatch.setattr(
        locations, "read", lambda path, start, stop: read.append((start, stop)) or plain(path, start, stop)
    )
    opened = blocks.open_files(str(path), "train_file", 1)
    assert not read, "nothing is read to open it"
    number = random.Random(0).randrange(len(opened))
    assert opened[number][0]["text"].isdigit()
    assert all(stop - start < 3000 for start, stop in read) and len(read) == 1


def test_documents_of_a_source_are_blocks_of_one(tmp_path):
    opened = blocks.of_source([{"text": "a"}, {"text": "b"}], "name", lambda: "fingerprint")
    assert (len(opened), opened.group, opened.fingerprint()) == (2, 1, "fingerprint")
    assert documents(opened) == [{"text": "a"}, {"text": "b"}] and places(opened) == [
        "name, example 0",
        "name, example 1",
    ]
