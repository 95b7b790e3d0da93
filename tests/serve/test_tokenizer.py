"""Checks prompts and conversations against the tokenizer and the trainer's task. This module tests zerojax.serve.tokenizer."""

import json
import shutil

import chats
import golden_models
import numpy as np
import pytest
import tokenizers
from tool_templates import ARGUMENTS, TALKS

from zerojax.data import tokenizer as tokenizer_lib
from zerojax.errors import UserError
from zerojax.inference.engine import detokenizer, requests
from zerojax.interop import folder as folder_lib
from zerojax.serve import responses, tokenizer

WORDS = ["<s>", "</s>", "<pad>", "one", "two", "three", "user", "assistant", "#"]
TALK = [("system", "one"), ("user", "two </s>"), ("assistant", "three"), ("user", "one")]


@pytest.fixture
def spoken(tmp_path):
    """Returns the folder of a model with a tokenizer of nine words."""
    folder = tmp_path / "model"
    shutil.copytree(golden_models.FOLDER / "qwen2", folder)
    vocab = {word: number for number, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Whitespace(), tokenizers.pre_tokenizers.Punctuation()]
    )
    made.add_special_tokens(WORDS[:3])
    made.save(str(folder / "tokenizer.json"))
    return folder


def of(folder, chat_template="auto"):
    return tokenizer.of_folder(folder_lib.open_folder(folder), chat_template)


def test_a_folder_without_a_tokenizer_reads_and_writes_ids():
    made = of(golden_models.FOLDER / "llama")
    assert made.ids_of(" 3 15\n7") == [3, 15, 7] and made.text_of([3, 15]) == "3 15" and made.name_of(3) == "3"
    assert made.chat_template == ""
    for text in ("", "a", "3,4", "٣", "1" * 10):
        with pytest.raises(UserError, match=r"prompt: the model's folder has no tokenizer.json"):
            made.ids_of(text)
    with pytest.raises(UserError, match=r"messages: .* ask /v1/completions"):
        made.conversation(TALK)


def test_texts_are_read_and_written_as_generate_does(spoken):
    made, (model, _) = of(spoken), tokenizer_lib.read_model(spoken / "tokenizer.json", "it")
    assert made.ids_of("one </s> two") == model.encode("one </s> two").ids == [3, 1, 4]
    assert made.text_of([3, 1, 4]) == "one two" and made.name_of(1) == "</s>"
    with pytest.raises(UserError, match="prompt: a text without any token"):
        made.ids_of(" ")


@pytest.mark.parametrize("kind, cleans", [("Unigram", True), ("Unigram", False), ("BPE", True)])
def test_answers_lose_spaces_before_marks_where_transformers_drops_them_however_they_are_sent(spoken, kind, cleans):
    words = ["<unk>", "▁do", "▁n", "'", "t", "▁", ".", "▁'", "s", "▁so", "▁it"]
    vocab = {word: number for number, word in enumerate(words)}
    models = tokenizers.models
    made = models.Unigram([(word, -1.0) for word in words], 0) if kind == "Unigram" else models.BPE(vocab, [])
    pieces = tokenizers.Tokenizer(made)
    pieces.pre_tokenizer, pieces.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    pieces.save(str(spoken / "tokenizer.json"))
    (spoken / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": cleans}))
    made, ids = of(spoken), [1, 2, 3, 4, 9, 5, 6, 10, 7, 8, 7, 9, 7]
    # What PreTrainedTokenizerFast of transformers 5.24 decodes
    whole = "don't so. it's'so '" if kind == "Unigram" and cleans else "do n't so . it 's ' so '"
    assert tokenizer_lib.load_tokenizer(str(spoken / "tokenizer.json")).decode(ids) == whole
    asked = requests.Request(
        np.array([0]), requests.RequestSettings(), len(ids), so_far=detokenizer.Growing(made.text_of)
    )
    writer = responses.Writer(made, "m", is_chat=True, prompts=1, choices=[asked])
    sent = ""
    for token in ids:
        asked.add(token, None, ())
        sent += "".join(one["choices"][0]["delta"].get("content", "") for one in writer.changes(has_usage=False))
        assert whole.startswith(sent)
    assert sent == whole


def test_a_completion_begins_with_the_space_that_its_tokenizer_leaves_out_at_the_beginning_of_a_text(spoken):
    pieces = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁one": 0, "two": 1, "<unk>": 2}, unk_token="<unk>"))
    pieces.pre_tokenizer, pieces.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    pieces.save(str(spoken / "tokenizer.json"))
    made = of(spoken)
    assert [made.text_of([0, 1]), made.before(0), made.before(1)] == ["onetwo", " ", ""]
    assert [made.name_of(0), made.name_of(1)] == [" one", "two"], "as log probabilities name tokens"
    asked = requests.Request(np.array([0]), requests.RequestSettings(), 2, so_far=detokenizer.Growing(made.text_of))
    for token in (0, 1):
        asked.add(token, None, ())
    for is_chat, text in ((False, " onetwo"), (True, "onetwo")):
        answer = responses.Writer(made, "m", is_chat=is_chat, prompts=1, choices=[asked]).whole()["choices"][0]
        assert (answer["message"]["content"] if is_chat else answer["text"]) == text


def test_a_conversation_has_the_folders_template_in_which_special_tokens_are_written_out(spoken):
    template = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>assistant{% endif %}"
    (spoken / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert of(spoken).chat_template == "own" and of(spoken).conversation(TALK[1:2]) == [0, 6, 4, 1, 0, 7]
    (spoken / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ raise_exception('no') }}"}))
    with pytest.raises(UserError, match="its chat template refuses a conversation: no"):
        of(spoken).conversation(TALK)


def test_a_template_whose_process_has_ended_is_started_again(spoken):
    (spoken / "tokenizer_config.json").write_text(json.dumps({"chat_template": "two"}))
    made = of(spoken)
    made._chat._process.kill()
    made._chat._process.wait()
    assert made.conversation([("user", "two")]) == [4]


def test_a_tokenizer_whose_regex_gives_up_refuses_the_text(spoken):
    """Its library panics, which is no Exception."""
    model = tokenizers.Tokenizer.from_file(str(spoken / "tokenizer.json"))
    slow = tokenizers.Regex("(a+)+$")
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(slow, "isolated")
    model.decoder = tokenizers.decoders.Replace(slow, "b")
    model.add_tokens(["a" * 40 + "b"])
    model.save(str(spoken / "tokenizer.json"))
    made = of(spoken)
    with pytest.raises(
        UserError, match=r"^prompt: the tokenizer cannot encode it \(.*retry-limit.*\); shorten the text"
    ):
        made.ids_of("a" * 40 + "c")
    with pytest.raises(UserError, match=r"tokenizer.json: cannot decode an answer \(.*retry-limit.*\); mend"):
        made.text_of([model.token_to_id("a" * 40 + "b")])


def test_without_a_template_a_conversation_is_that_of_the_task_chat(spoken):
    """Letters of special tokens in a message are letters, and the end token follows each answer."""
    hashes = [WORDS.index("#")] * 3
    assert of(spoken).chat_template == "plain"
    found = of(spoken).conversation(TALK)
    end = folder_lib.open_folder(spoken).setting("eos_token_id")
    assert found == [*hashes, 2, 3, *hashes, 6, 4, *found[10:14], *hashes, 7, 5, end, *hashes, 6, 3, *hashes, 7]
    assert 1 not in found[10:14]  # "</s>" as letters
    with pytest.raises(UserError, match="own"):
        of(spoken, "own")


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": json.loads(ARGUMENTS)}}
    ],
}
ASKED = [{"role": "user", "content": "x"}, CALLED, {"role": "tool", "content": 'is "3"', "name": "add"}]


def talking(folder, template):
    """Returns the words of a model whose tokenizer has every byte, and the mark of Mistral's calls as a special token."""
    shutil.copytree(golden_models.FOLDER / "qwen2", folder)
    chats.write(folder / "words", "byte_level", template)
    for path in (folder / "words").iterdir():
        path.replace(folder / path.name)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(["[TOOL_CALLS]"])
    made.save(str(folder / "tokenizer.json"))
    return of(folder)


@pytest.mark.parametrize("name", TALKS)
def test_tools_are_offered_as_transformers_offers_them_and_marks_of_calls_are_text(name, tmp_path):
    import transformers  # takes a second, of each process that collects tests

    talk, folder = TALKS[name], tmp_path / "model"
    made = talking(folder, talk.template)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = theirs.apply_chat_template(ASKED, tools=[ADD], add_generation_prompt=True, tokenize=False)
    assert '"properties"' in text and "</tool_call> é" in text
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert made.conversation(ASKED, [ADD]) == model.encode(text, add_special_tokens=False).ids
    ids = model.encode(f"<s>one {talk.call}{talk.then}", add_special_tokens=False).ids
    assert made.text_of(ids) == f"one {talk.call}{talk.then}"


def test_what_a_template_does_not_write_is_refused_and_never_left_out(tmp_path):
    plain = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    no_results = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
    cases = {
        "tools: the chat template writes no tools": (plain, ASKED[:1], [ADD]),
        "tools: the chat template writes calls in a form that is not read": (no_results, ASKED[:1], [ADD]),
        "messages: the chat template writes no tool_calls": (plain, ASKED, []),
        "messages: the chat template writes no message of role tool": (no_results, ASKED, []),
    }
    for number, (line, (template, messages, tools)) in enumerate(cases.items()):
        with pytest.raises(UserError, match=line):
            talking(tmp_path / str(number), template).conversation(messages, tools)


def test_the_plain_template_writes_no_tools(spoken):
    with pytest.raises(UserError, match="tools: the chat template writes no tools"):
        of(spoken).conversation(ASKED[:1], [ADD])
    with pytest.raises(UserError, match="messages: the chat template writes no tool_calls"):
        of(spoken).conversation(ASKED)
