import json

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from zerojax.data import tokenizer
from zerojax.errors import UserError

CORPUS = ["def foo(): return 'hello world'", "class Bar: pass  # hello"] * 5


def write_tokenizer(path, special_tokens=("<s>", "</s>"), model_class=models.BPE) -> str:
    """Trains a byte-level BPE on a few lines, so that no file has to be fetched."""
    model = tokenizers.Tokenizer(model_class())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    model.enable_truncation(4)
    model.enable_padding(length=4)
    model.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return named(tmp_path_factory.mktemp("bpe"), ("<s>", "</s>"), {"bos_token": "<s>", "eos_token": "</s>"})


@hypothesis.given(st.binary())
def test_byte_ids_are_the_bytes(data):
    ids = tokenizer.ByteTokenizer().encode(data)
    assert ids.dtype == np.int32 and bytes(ids.tolist()) == data
    assert tokenizer.ByteTokenizer().decode(ids) == data.decode("utf-8", errors="replace")


@hypothesis.given(st.text())
def test_byte_tokenizer_gives_text_back(text):
    byte_tokenizer = tokenizer.ByteTokenizer()
    assert byte_tokenizer.decode(byte_tokenizer.encode(text)) == text
    for encode in (byte_tokenizer.encode, byte_tokenizer.encode_whole, byte_tokenizer.encode_special):
        np.testing.assert_array_equal(encode(text), byte_tokenizer.encode(text.encode()))


def test_what_is_no_letter_is_refused_and_not_replaced(bpe):
    for own in (tokenizer.ByteTokenizer(), bpe):
        for encode in (own.encode, own.encode_whole, own.encode_special):
            with pytest.raises(UserError, match=r"a text holds half of a surrogate pair|cannot encode"):
                encode("a\ud800b")
    with pytest.raises(UserError, match=r"^a text is not UTF-8 at its byte 1 "):
        bpe.encode(b"a\xff")
    np.testing.assert_array_equal(*(bpe.encode(form) for form in ("\u00e9", "\u00e9".encode())))


def test_byte_tokenizer_drops_ids_that_are_not_bytes():
    byte_tokenizer = tokenizer.load_tokenizer("bytes")
    assert byte_tokenizer.decode([104, byte_tokenizer.bos_id, 319, -1, 105]) == "hi"
    assert byte_tokenizer.decode(np.array([0xC3, 0x28])) == "\N{REPLACEMENT CHARACTER}("


def test_byte_vocab_holds_the_separator_and_divides_by_64():
    byte_tokenizer = tokenizer.ByteTokenizer()
    assert byte_tokenizer.bos_id < byte_tokenizer.vocab_size and byte_tokenizer.vocab_size % 64 == 0


@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"])))
@hypothesis.settings(max_examples=50)
def test_places_are_the_characters_of_the_ids(bpe, text):
    for own in (bpe, tokenizer.ByteTokenizer()):
        for is_special in (False, True):
            ids, places = own.encode_places(text, is_special=is_special)
            np.testing.assert_array_equal(ids, (own.encode_special if is_special else own.encode)(text))
            assert places.shape == (len(ids), 2) and all(0 <= a <= b <= len(text) for a, b in places)
            covered = {at for a, b in places for at in range(a, b)}
            assert covered == set(range(len(text)))  # neither leaves a character out


@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"])))
@hypothesis.settings(max_examples=50)
def test_file_tokenizer_gives_text_back_without_truncation_or_padding(bpe, text):
    ids = bpe.encode(text)
    assert ids.dtype == np.int32 and bpe.bos_id not in ids
    assert bpe.decode(ids) == text
    np.testing.assert_array_equal(ids, bpe.encode(text.encode()))


def test_file_vocab_bounds_every_id_and_decode_drops_the_others(bpe):
    assert bpe.vocab_size == 280 and bpe.bos_id == 0
    ids = bpe.encode("hello")
    assert bpe.decode([*ids, bpe.bos_id, 280, 10**6, -1]) == "hello"


def test_a_special_token_spelled_out_in_a_document_is_plain_text(bpe):
    ids = bpe.encode("a <s> b</s>")
    assert bpe.bos_id not in ids and bpe.decode(ids) == "a <s> b</s>"


def test_sparse_ids_are_below_the_vocab_size(tmp_path):
    path = tmp_path / "tokenizer.json"
    model = tokenizers.Tokenizer(models.WordLevel({"a": 5, "[BOS]": 9}, unk_token="a"))
    model.save(str(path))
    loaded = tokenizer.load_tokenizer(str(path))
    assert loaded.vocab_size == 10


def named(folder, names, config=None, **files):
    """Returns a tokenizer with these special tokens, beside files of these contents."""
    path = write_tokenizer(folder / "tokenizer.json", names)
    for name, content in {"tokenizer_config": config, **files}.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return tokenizer.load_tokenizer(path)


@pytest.mark.parametrize(
    "files, before",
    [
        ({"config": {"bos_token": "[E]", "eos_token": "[B]"}}, 2),
        ({"config": {"eos_token": {"content": "[B]"}}}, 1),
        ({"special_tokens_map": {"eos_token": "[B]"}}, 1),
        ({"config": {"eos_token": "[E]", "added_tokens_decoder": {}}, "special_tokens_map": {"eos_token": "[B]"}}, 2),
        ({"generation_config": {"bos_token_id": 2, "eos_token_id": [1]}}, 2),
        ({"config": {"eos_token": "[B]"}, "generation_config": {"bos_token_id": 2}}, 2),
        ({"config": {"tokenizer_class": "GPT2Tokenizer"}}, 280),
    ],
)
def test_documents_are_separated_by_what_the_files_name_and_not_by_a_spelling(tmp_path, files, before):
    own = named(tmp_path, ("<s>", "[B]", "[E]"), **files)
    assert own.document.before == (before,) and own.document.after == ()
    assert tokenizer.told(own).startswith(f"each document begins with {own.name_of(before)!r} ({before}): ")


def test_what_the_post_processor_adds_stands_around_documents(tmp_path):
    path = tmp_path / "tokenizer.json"
    model = tokenizers.Tokenizer.from_file(write_tokenizer(path, ("[C]", "[S]", "<s>")))
    model.post_processor = tokenizers.processors.TemplateProcessing(
        "[C] $A [S]", special_tokens=[("[C]", 0), ("[S]", 1)]
    )
    model.save(str(path))
    own = tokenizer.load_tokenizer(str(path))
    assert own.document[:2] == own.around[:2] == ((0,), (1,)) and (own.bos_id, own.end_id) == (0, 1)
    assert own.encode_whole("hi").tolist() == [0, *own.encode("hi"), 1]


def test_a_tokenizer_that_names_no_special_token_has_no_documents_and_all_else(tmp_path):
    own = named(tmp_path, ("[PAD]", "[UNK]", "<s>", "<|endoftext|>"))
    assert own.bos_id is own.end_id is None and own.around[:2] == ((), ()) and own.encode("hi").size
    with pytest.raises(UserError, match=r"names no token that separates documents: name one as bos_token or eos_token"):
        tokenizer.told(own)


@pytest.mark.parametrize("text", ["", "not json", "{}", json.dumps({"version": "1.0", "model": {"type": "Odd"}})])
def test_a_corrupt_file_is_an_error_of_one_line(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(UserError, match="not a readable tokenizer") as caught:
        tokenizer.load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["", "byte", ".", "nowhere/tokenizer.json"])
def test_the_error_for_a_missing_file_lists_the_choices(spec):
    with pytest.raises(UserError, match='is not a file; set it to "bytes" or the path'):
        tokenizer.load_tokenizer(spec)


def test_a_fork_after_encoding_prints_no_warning(commands, tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    # Python 3.12 itself warns of any fork beside threads, such as numpy's; what tokenizers prints is no warning of Python's.
    code = (
        "import os, warnings; from zerojax.data import tokenizer;"
        "warnings.simplefilter('ignore', DeprecationWarning);"
        f"t = tokenizer.load_tokenizer({path!r}); t.encode('hello world ' * 1000);"
        "pid = os.fork();\n"
        "if pid == 0: t.encode('hello'); os._exit(0)\n"
        "os.waitpid(pid, 0)"
    )
    done = commands.python(code)
    assert (done.status, done.err) == (0, "")


@pytest.mark.parametrize("begins", [True, False])
def test_the_file_of_a_tokenizer_gives_the_same_ids(tmp_path, bpe, begins):
    path, text = tmp_path / "tokenizer.json", "naïve 🙂\n\tdef f(): <|endoftext|> 1"
    for own in (tokenizer.load_tokenizer("bytes"), bpe):
        path.write_text(json.dumps(own.file(begins=begins)))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": own.name_of(own.bos_id)}))
        saved = tokenizer.load_tokenizer(str(path))
        assert saved.encode(text).tolist() == own.encode(text).tolist() and saved.decode(own.encode(text)) == text
        assert (saved.vocab_size, saved.bos_id, list(saved.sentinels)) == (
            own.vocab_size,
            own.bos_id,
            list(own.sentinels),
        )
    path.write_text(json.dumps(tokenizer.load_tokenizer("bytes").file(begins=begins)))
    saved = tokenizer.load_tokenizer(str(path))
    assert saved.encode_whole("ab").tolist() == [*([256] if begins else []), 97, 98]
    assert saved.encode_special("a<|endoftext|>").tolist() == [97, 256]


def test_what_is_settled_of_a_text_stays_as_it_is_when_more_comes():
    """Also where one mark's space makes another's: "  ' ve" is "'ve"."""
    text = "so  ' ve it  ' re , n't  ' s . it's  !  ' '"
    whole = tokenizer.cleaned(text)
    assert "so've it're," in whole
    for end in range(len(text)):
        assert whole.startswith(tokenizer.cleaned(tokenizer.settled(text[:end]))), text[:end]
