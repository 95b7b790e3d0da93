"""Checks what the files beside a tokenizer.json say of it. This module tests zerojax.data.token_files."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from zerojax.data import token_files, tokenizer
from zerojax.errors import UserError

WORDS = ["<unk>", "<s>", "</s>", "▁", "g", "o", "▁g", "go", "▁go", "[A]"]


def write(folder, model=None, **files):
    """Writes a tokenizer and files beside it, and returns the tokenizer as it is run."""
    if model is None:
        merges = [("g", "o"), ("▁", "go")]
        model = tokenizers.Tokenizer(models.BPE({word: at for at, word in enumerate(WORDS)}, merges, unk_token="<unk>"))
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        model.decoder = decoders.Metaspace()
        model.add_special_tokens(["<unk>", "<s>", "</s>"])
    model.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return tokenizer.load_tokenizer(str(folder / "tokenizer.json"))


def tokens(own, text):
    return [own.name_of(token) for token in own.encode_special(text).tolist()]


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, ["</s>", "▁go"]),  # no class is named: the file runs as it is
        ({"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}}, ["</s>", "▁go"]),
        (
            {"tokenizer_config": {"tokenizer_class": "LlamaTokenizer"}, "config": {"model_type": "mistral"}},
            ["</s>", "▁go"],
        ),
        ({"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast"}}, ["</s>", "go"]),
        (
            {"tokenizer_config": {"tokenizer_class": "LlamaTokenizer"}, "config": {"model_type": "llama"}},
            ["</s>", "go"],
        ),
        ({"tokenizer_config": {"tokenizer_class": "LlamaTokenizer", "legacy": True}}, ["</s>", "▁go"]),
        ({"tokenizer_config": {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}}, ["</s>", "go"]),
    ],
)
def test_the_class_decides_where_a_space_is_put_after_a_special_token(tmp_path, files, expected):
    own = write(tmp_path, **files)
    assert tokens(own, "</s>go") == expected
    assert own.decode(own.encode("go go")) == "go go"


def test_a_byte_level_file_of_that_class_runs_as_it_is(tmp_path):
    model = tokenizers.Tokenizer(models.BPE({"a": 0, "Ġ": 1}, []))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own = write(tmp_path, model, tokenizer_config={"tokenizer_class": "LlamaTokenizer"})
    assert tokens(own, "a a") == ["a", "Ġ", "a"]


def test_tokens_that_the_files_name_are_special_and_added_where_they_are_missing(tmp_path):
    own = write(
        tmp_path, tokenizer_config={"eos_token": "[A]", "image_token": "<img>", "extra_special_tokens": ["<x>"]}
    )
    assert (own.end_id, own.bos_id) == (9, None)
    assert tokens(own, "[A]<img><x>") == ["[A]", "<img>", "<x>"] and own.vocab_size == len(WORDS) + 2
    assert token_files.named(tmp_path) == {"eos_token": "[A]", "image_token": "<img>"}
    assert {9, 10, 11} <= own.special_ids


def test_the_older_map_is_read_where_the_newer_form_is_missing(tmp_path):
    older, newer = {"eos_token": {"content": "[A]"}}, {"eos_token": "</s>"}
    assert write(tmp_path, special_tokens_map=older, tokenizer_config=newer).end_id == 9
    assert write(tmp_path, tokenizer_config=newer | {"added_tokens_decoder": {}}).end_id == 2


def test_properties_of_added_tokens_are_those_of_the_config(tmp_path):
    token = {
        "content": "[A]",
        "lstrip": True,
        "rstrip": True,
        "normalized": False,
        "special": True,
        "single_word": False,
    }
    own = write(tmp_path, tokenizer_config={"added_tokens_decoder": {"9": token}})
    assert tokens(own, "go [A] go") == ["▁go", "[A]", "▁go"]
    for flag in ("lstrip", "rstrip"):
        token[flag] = False
    own = write(tmp_path, tokenizer_config={"added_tokens_decoder": {"9": token}})
    assert tokens(own, "go [A] go") == ["▁go", "▁", "[A]", "▁", "▁go"]


def test_special_tokens_are_letters_where_the_config_says_so(tmp_path):
    own = write(tmp_path, tokenizer_config={"split_special_tokens": True})
    assert "</s>" not in tokens(own, "</s>")


def test_a_class_names_what_its_files_do_not(tmp_path):
    write(tmp_path, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "unk_token": None})
    assert token_files.named(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "name, content, line",
    [
        ("tokenizer_config", [], "is not a table of settings"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {}}}, "is not a table of tokens by id"),
        ("tokenizer_config", {"added_tokens_decoder": {"1": "a"}}, "a token of added_tokens_decoder is 'a'"),
        (
            "tokenizer_config",
            {"split_special_tokens": "no"},
            "split_special_tokens: must be true or false, and is 'no'",
        ),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"1": {"content": "a", "lstrip": "no"}}},
            "lstrip: must be true or",
        ),
        ("special_tokens_map", 3, "is not a table of settings"),
        ("generation_config", "x", "is not a table of settings"),
    ],
)
def test_a_damaged_file_is_one_line_with_its_name(tmp_path, name, content, line):
    with pytest.raises(UserError, match=line) as caught:
        write(tmp_path, **{name: content})
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
