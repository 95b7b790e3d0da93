"""Checks that examples of every kind of file are read, and that damaged ones are named. This module tests zerojax.data.pairs.records."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from zerojax.data.pairs import records
from zerojax.errors import UserError

ROWS = [
    {"text": "good, really", "label": "yes"},
    {"text": "two\nlines", "label": "no"},
    {"text": "naïve 🙂", "label": "yes"},
]
KEY = "train_file"


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    else:
        mark = "," if path.suffix == ".csv" else "\t"
        path.write_text(
            "".join(mark.join(f'"{cell}"' for cell in row) + "\n" for row in (rows[0], *(r.values() for r in rows))),
            encoding="utf-8",
        )
    return path


def test_a_folder_that_exists_is_no_pattern_and_what_is_below_it_may_be_one(tmp_path):
    folder = tmp_path / "runs [1]*"
    folder.mkdir()
    for name in ("b.jsonl", "a.jsonl", "a[b].jsonl"):
        write(folder / name, ROWS[:1])
    names = [["a.jsonl", "a[b].jsonl", "b.jsonl"], ["a[b].jsonl"], ["b.jsonl"], []]
    for pattern, expected in zip(("*.jsonl", "a[b].jsonl", "[b].jsonl", "[c].jsonl"), names):
        assert records.matching(f"{folder}/{pattern}") == [str(folder / name) for name in expected]
    assert records.matching(f"{tmp_path}/**/b.jsonl") == [str(folder / "b.jsonl")]
    (folder / "deep").mkdir()
    deep = write(folder / "deep" / "b.jsonl", ROWS[:1])
    assert records.matching(f"{tmp_path}/**/b.jsonl") == [str(folder / "b.jsonl"), str(deep)]


@pytest.mark.parametrize("suffix", records._OPENERS)
def test_every_format_holds_the_same_examples(tmp_path, suffix):
    write(tmp_path / f"a{suffix}", ROWS[:2])
    write(tmp_path / f"b{suffix}", ROWS[2:])
    opened = records.Files(f"{tmp_path}/*{suffix}", KEY)
    assert [opened[index] for index in range(len(opened))] == ROWS
    assert opened.place(2).startswith(f"{tmp_path}/b{suffix}:")


def test_lines_are_numbered_as_an_editor_does(tmp_path):
    assert records.Files(str(write(tmp_path / "a.jsonl", ROWS)), KEY).place(1).endswith("a.jsonl:3")
    table = records.Files(str(write(tmp_path / "a.csv", ROWS)), KEY)
    assert [table.place(index).rpartition(":")[2] for index in range(3)] == ["2", "3", "5"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl:2: is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "a.jsonl:2: is [1], and an example has named fields"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl:2: is not UTF-8 text"),
        (
            "a.jsonl",
            b'{"a": 1}\n{"text": "a", "b": 2, "text": "b"}\n',
            "a.jsonl:2: is not JSON (the key 'text' comes twice)",
        ),
        ("a.json", b'[{"a": 1}, {"b": {"c": 1, "c": 2}}]', "a.json:example 2: is not JSON (the key 'c' comes twice)"),
        (
            "a.jsonl",
            b'{"a": 1}\n{"text": ["a\\uD800"]}',
            'a.jsonl:2: holds half of a surrogate pair, which is no letter, near \'{"text": ["a\\ud800\'; mend',
        ),
        ("a.json", b'[{"a\\udc00\\ud83d": 1}]', "a.json:example 1: holds half of a surrogate pair"),
        ("a.csv", b"text,label\na,b\nc\n", "a.csv:3: has 1 values, and line 1 names 2 fields"),
        ("a.csv", b'text,label\na,"b\n', "a.csv:2: is no row of a table"),
        ("a.csv", b"text,text\na,b\n", "a.csv:1: names the fields"),
        ("a.parquet", b"PAR1", "a.parquet: cannot be read as parquet (Parquet file size is 4 bytes"),
        ("a.csv", b"PAR1\xff", "a.csv is a parquet file under another name; rename it to a.parquet"),
        ("a.txt", b"hello", "is not one of .jsonl, .json"),
        ("a.jsonl.zst", b"\x28\xb5", ".parquet; decompress it"),
        ("a.jsonl", b"\n", "has no examples"),
        ("b.jsonl", b"", "there is no file"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)):
        opened = records.Files(str(tmp_path / name.replace("b.jsonl", "c.jsonl")), KEY)
        [opened[index] for index in range(len(opened))]


@pytest.mark.parametrize("form", ['{"text": "\\ud83d\\ude00"}\n', '[{"text": "\\uD83D\\uDE00"}]'])
def test_a_letter_of_two_halves_is_one(tmp_path, form):
    path = tmp_path / "a.json"
    path.write_text(form)
    assert records.Files(str(path), KEY)[0] == {"text": "\U0001f600"}


def test_a_folder_is_refused_with_the_pattern_of_its_files(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"saved is a folder of datasets, and .*load_from_disk\('.*saved'\)\.to_parquet"
    ):
        records.Files(str(tmp_path / "saved"), KEY)
    with pytest.raises(UserError, match=r"is a folder; name its files, as in .*\*.jsonl"):
        records.Files(str(tmp_path), KEY)


def test_a_document_without_text_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    opened = records.Files(str(path), KEY, needs="text")
    assert opened[0]["text"] == "a"
    with pytest.raises(UserError, match=r"a.jsonl:2: has no text in field 'text'"):
        opened[1]


def test_a_group_of_a_parquet_row_has_the_fields_that_were_written_and_json_is_read(tmp_path):
    rows = [{"calls": [{"f": {"a": 1}}], "tools": [{"b": None}]}, {"calls": [{"f": {"b": "x"}}, {}], "tools": None}]
    tools = pyarrow.array([row["tools"] and [json.dumps(tool) for tool in row["tools"]] for row in rows])
    tools = tools.cast(pyarrow.list_(pyarrow.json_()))
    calls = pyarrow.array([row["calls"] for row in rows])
    pyarrow.parquet.write_table(pyarrow.table({"calls": calls, "tools": tools}), tmp_path / "a.parquet")
    found = records.Files(str(tmp_path / "a.parquet"), "train_file")
    assert [found[index] for index in range(2)] == rows


def test_a_parquet_page_that_is_not_what_its_checksum_says_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist([{"text": f"cat {n}"} for n in range(50)])
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"cat 7", b"cut 7", 1))
    with pytest.raises(UserError, match=rf"^{path}: cannot be read as parquet \(.*CRC"):
        records.Files(str(path), KEY)
