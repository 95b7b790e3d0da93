"""Checks what examples become in decoders and in encoder-decoders. This module tests zerojax.data.pairs.tasks."""

import dataclasses
import re

import chats
import numpy as np
import pytest
import tokenizers

from zerojax.data import tokenizer
from zerojax.data.pairs import tasks, templates
from zerojax.errors import UserError

BYTES = tokenizer.load_tokenizer("bytes")
END, START = 256, 0
SETTINGS = tasks.TaskSettings("seq2seq", "Q: {text} A: ", "{label}", (), "messages", "plain")
PAIR = tasks.RowForm(True, 24, 8, START, END, None, (END,))
ONE = tasks.RowForm(False, 24, 8, START, END, END, (END,))
EXAMPLES = [{"text": "one", "label": "yes"}, {"text": "two", "label": "no"}]


def encode(examples, form, settings=SETTINGS, **options):
    return tasks.encode(examples, BYTES, settings, form, name="file", **options)


def labels(example):
    """Returns the text of the labels."""
    return BYTES.decode((example.inputs if len(example.targets) == 0 else example.targets)[example.labeled])


def test_a_decoder_learns_the_answer_and_its_end_after_the_prompt():
    one = encode(EXAMPLES, ONE).examples[0]
    assert one.inputs.tolist() == [END, *b"Q: one A: yes", END]
    assert labels(one) == "yes" and one.labeled[-1] and one.labeled.sum() == 4
    assert BYTES.decode(one.inputs[: one.prompt]) == "Q: one A: " and one.answer == "yes"


def test_no_prompt_of_grpo_loses_its_beginning_for_a_long_label():
    found = encode([{"text": "one", "label": "yes" * 9}], ONE, dataclasses.replace(SETTINGS, task="grpo"))
    (asked,) = tasks.prompts(found.examples, ONE)
    assert BYTES.decode(asked) == "Q: one A: " and found.examples[0].answer == "yes" * 9
    assert not any("are cut" in note for note in found.notes)


def test_an_encoder_decoder_reads_the_prompt_and_learns_the_answer():
    one = encode(EXAMPLES, PAIR).examples[0]
    assert one.inputs.tolist() == [*b"Q: one A: "]
    assert one.targets.tolist() == [START, *b"yes", END] and one.labeled.tolist() == [False] + [True] * 4


@pytest.mark.parametrize("form", [ONE, PAIR], ids=["decoder", "encoder-decoder"])
def test_long_examples_are_cut_and_told_with_the_first_of_them(form):
    rows = [
        *EXAMPLES,
        {"text": "x" * 40, "label": "yes"},
        {"text": "y" * 50, "label": "much too long" * 3},
        {"text": "", "label": ""},
    ]
    found = encode(rows, form)
    assert any("2 of 5 prompts" in note and "the first: file, example 2" in note for note in found.notes)
    assert any("1 of 5 answers are longer" in note and "example 3" in note for note in found.notes)
    assert any("1 of 5 answers are empty" in note and "example 4" in note for note in found.notes)
    for example in found.examples:
        assert len(example.inputs) <= 24 + (not form.is_encoder_decoder) and len(example.targets) <= 9
        assert example.labeled.any() and not example.labeled[0]
    cut = found.examples[2]
    assert labels(cut) == "yes"
    if not form.is_encoder_decoder:
        assert cut.inputs[0] == END and BYTES.decode(cut.inputs).endswith("xx A: yes")


CHAT = dataclasses.replace(SETTINGS, task="chat")
TALK = [
    ("system", "S"),
    ("user", "U1"),
    ("assistant", "A1"),
    ("user", "U2"),
    ("assistant", "A2"),
    ("user", "unanswered"),
]
TALKS = [{"messages": [{"role": role, "content": content} for role, content in TALK]}]


def test_every_answer_of_a_conversation_is_a_label_and_nothing_follows_the_last():
    form = dataclasses.replace(ONE, seq_len=200)
    one = encode(TALKS, form, CHAT).examples[0]
    assert labels(one) == "A1A2" and (one.inputs[one.labeled] == END).sum() == 2
    text = "### system\nS\n\n### user\nU1\n\n### assistant\nA1\n\n### user\nU2\n\n### assistant\nA2"
    assert BYTES.decode(one.inputs) == text and one.answer == "A2"
    assert BYTES.decode(one.inputs[: one.prompt]) == text[:-2]
    short = dataclasses.replace(form, seq_len=len(one.inputs) - 1 - int(np.flatnonzero(one.labeled)[1]), bos=None)
    cut = encode(TALKS, short, CHAT).examples[0]  # within the first answer, of which nothing tells the next token
    assert len(cut.inputs) == short.seq_len + 1 and not cut.labeled[0] and cut.inputs[0] == one.inputs[one.labeled][1]
    pair = encode(TALKS, dataclasses.replace(PAIR, seq_len=200), CHAT).examples[0]
    assert BYTES.decode(pair.inputs) == text[:-2] and labels(pair) == "A2"


@pytest.mark.parametrize("form", [ONE, PAIR], ids=["decoder", "encoder-decoder"])
def test_a_model_is_asked_what_its_training_asked_with_and_without_a_label(form):
    form = dataclasses.replace(form, seq_len=200)
    known = encode(EXAMPLES, form).examples
    asked = tasks.ask([EXAMPLES[0], {"text": "two"}], BYTES, SETTINGS, form, name="file")
    assert asked.labels == ["yes", None]
    np.testing.assert_equal(asked.prompts, list(tasks.prompts(known, form)))

    talk = TALKS[0]["messages"][:5]  # the assistant's answer is the last message
    (known,) = tasks.prompts(encode([{"messages": talk}], form, CHAT).examples, form)
    asked = tasks.ask([{"messages": talk[:at]} for at in (5, 4, 2)], BYTES, CHAT, form, name="file")
    assert asked.labels == ["A2", None, None]
    np.testing.assert_equal(asked.prompts[:2], [known, known])
    assert BYTES.decode(asked.prompts[2]) == "### system\nS\n\n### user\nU1\n\n### assistant\n"


def test_the_tokens_of_a_tokenizers_template_are_one_id_each_and_its_end_ends_an_answer(tmp_path):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "U1": 1, "A1": 2}, "[UNK]"))
    model.add_special_tokens(["<s>", "[U]", "[A]", "[E]"])
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "<s>{% for m in messages %}{{ '[U]' if m.role == 'user' else '[A]' }}{{ m.content }}[E]{% endfor %}"
        "{% if add_generation_prompt %}[A]{% endif %}"
    )
    own = tokenizer.load_tokenizer(str(tmp_path / "tokenizer.json"))
    settings = dataclasses.replace(CHAT, chat_template="own")
    rows = [{"messages": [{"role": "user", "content": "U1"}, {"role": "assistant", "content": "A1"}]}]
    form = dataclasses.replace(ONE, bos=None, end=6, stops=(6,))
    found = tasks.encode(rows, own, settings, form, name="f", folder=tmp_path)
    one = found.examples[0]
    assert one.inputs.tolist() == [3, 4, 1, 6, 5, 2, 6] and one.inputs[one.labeled].tolist() == [2, 6]
    assert tasks.chat_of(own, settings, form, tmp_path) == (found.ends, found.template) and found.ends == (6,)
    assert len(found.notes) == 1  # no answer lacks its end
    assert own.encode("[U]").tolist() == [0]  # in a document these letters are no token


TURNS = [{"role": "user", "content": "U1"}, {"role": "assistant", "content": "A1"}]
WRITTEN = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"


def by_template(folder, template, *examples, **changes):
    """Returns what `tasks.encode` makes of conversations by a tokenizer's own template."""
    (folder / "chat_template.jinja").write_text(template)
    settings = dataclasses.replace(CHAT, chat_template="own", **changes)
    return tasks.encode(examples, BYTES, settings, dataclasses.replace(ONE, seq_len=99), name="f", folder=folder)


def test_what_a_template_never_writes_is_told_or_refused(tmp_path):
    """Tools are told, and a message that calls one or has reasoning is refused, unless the template names their field."""
    tools, told = [{"type": "function", "function": {"name": "f"}}], "conversations offer tools"
    call = [TURNS[0], {**TURNS[1], "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    thought = [TURNS[0], {**TURNS[1], "reasoning_content": "hm"}]
    plain = by_template(tmp_path, WRITTEN, {"messages": TURNS, "tools": tools}, {"messages": TURNS})
    assert [told in note for note in plain.notes].count(True) == 1
    system = [{"role": "system", "content": "S"}, *TURNS]
    aside = by_template(tmp_path, WRITTEN, {"messages": TURNS, "system": "S"}, {"messages": system, "system": "S"})
    assert ["1 of 2 examples have a field 'system', which" in note for note in aside.notes].count(True) == 1
    reads = WRITTEN.replace("{{ m.content }}", "{{ m.content }}{{ tools }}{{ m.tool_calls }}{{ m.reasoning_content }}")
    for messages in (TURNS, call, thought):
        assert not [
            note for note in by_template(tmp_path, reads, {"messages": messages, "tools": tools}).notes if told in note
        ]
    earlier = [TURNS[0], {**TURNS[1], "function_call": {"name": "f", "arguments": "{}"}}]
    for messages, word in ((call, "calls tools"), (earlier, "calls a function"), (thought, "has reasoning")):
        with pytest.raises(UserError, match=f"a message {word}, which the chat template never writes"):
            by_template(tmp_path, WRITTEN, {"messages": messages})


def test_what_a_template_writes_for_some_messages_alone_is_told_where_it_does_not(tmp_path):
    source = (
        "{% for m in messages %}{{ m.role[0] }}{% if m.content is string and m.content %}{{ m.content }}{% elif m.tool_calls %}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{{ m.reasoning_content }}{% endif %}"
        "{% endfor %}"
    )
    ends, thinks, calls = "an answer that ends with no special token", "reasoning that the", "calls of tools that the"
    call = {"function": {"name": "f", "arguments": {"x": "y"}}}
    quoted = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    for answer, told in (
        ({"content": "A1"}, [ends]),
        ({"content": "A1", "reasoning_content": "hm"}, [thinks, ends]),
        ({"content": "A1", "tool_calls": [call]}, [calls, ends]),
        ({"content": "", "tool_calls": [call]}, [ends]),
        ({"content": "", "tool_calls": [call, call]}, [calls, ends]),
        ({"content": "", "tool_calls": [quoted]}, ["writes in quotes: give tables", ends]),
        ({"content": [{"type": "text", "text": "A1"}]}, ["they are joined", ends]),
    ):
        found = by_template(tmp_path, source, {"messages": [TURNS[0], {"role": "assistant", **answer}]})
        assert len(found.notes) == 1 + len(told) and all(part in note for part, note in zip(told, found.notes[1:]))
        assert labels(found.examples[0])


def test_a_template_is_told_the_time_of_the_settings(tmp_path):
    noon = 1580731200.0  # 3 February 2020, 12:00 in UTC
    template = "{{ strftime_now('%Y') }}" + WRITTEN
    one = by_template(tmp_path, template, {"messages": TURNS}, now=noon).examples[0]
    assert BYTES.decode(one.inputs).startswith("2020u")


DPO = dataclasses.replace(SETTINGS, task="dpo", prompt="{prompt}", answer="{chosen}", rejected="{rejected}")


def both(example, form=ONE, settings=DPO):
    """Returns the chosen and the rejected answer of a pair, encoded."""
    form = dataclasses.replace(form, seq_len=200, answer_len=200)
    return [encode([example], form, settings, answer=key).examples[0] for key in ("answer", "rejected")]


def said(role, content):
    return {"role": role, "content": content}


ASKED = [said("system", "S"), said("user", "U1"), said("assistant", "A1"), said("user", "U2")]
GOOD, BAD = said("assistant", "good"), said("assistant", "bad")


@pytest.mark.parametrize("form", [ONE, PAIR], ids=["decoder", "encoder-decoder"])
def test_pairs_of_conversations_are_read_in_all_forms_and_their_answers_alone_are_labels(form):
    text = "### system\nS\n\n### user\nU1\n\n### assistant\nA1\n\n### user\nU2\n\n### assistant\n"
    whole = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
    forms = [
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
        whole,
        {"prompt": "U2", **whole},
        {"prompt": ASKED, **whole},
        {"prompt": ASKED, "chosen": "good", "rejected": "bad"},
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    ]
    for example in forms:
        for found, answer in zip(both(example, form), ("good", "bad")):
            prompt = found.inputs if form.is_encoder_decoder else found.inputs[: found.prompt]
            assert (BYTES.decode(prompt), labels(found), found.answer) == (text, answer, answer)
    (asked,) = tasks.ask([forms[0]], BYTES, DPO, dataclasses.replace(form, seq_len=200), name="file").prompts
    assert BYTES.decode(asked) == text
    asked = tasks.ask([{"prompt": ASKED}, whole], BYTES, DPO, dataclasses.replace(form, seq_len=200), name="file")
    asked_alone = tasks.ask(
        [{"chosen": whole["chosen"]}], BYTES, DPO, dataclasses.replace(form, seq_len=200), name="file"
    )
    assert asked_alone.labels == ["good"] and BYTES.decode(asked_alone.prompts[0]) == text
    assert asked.labels == [None, "good"] and {BYTES.decode(ids) for ids in asked.prompts} == {text}


def test_a_text_before_answers_that_are_messages_is_the_users():
    for found, answer in zip(both({"prompt": "U", "chosen": [GOOD], "rejected": [BAD]}), ("good", "bad")):
        assert BYTES.decode(found.inputs) == f"### user\nU\n\n### assistant\n{answer}" and labels(found) == answer


def test_answers_of_several_turns_have_all_their_answers_as_labels_and_an_encoder_refuses_them():
    more = {"prompt": ASKED, "chosen": [GOOD, said("user", "U3"), GOOD], "rejected": [BAD]}
    assert list(map(labels, both(more))) == ["goodgood", "bad"]
    with pytest.raises(UserError, match="`answer` has 3 messages after the prompt, and an encoder reads one"):
        both(more, PAIR)


def test_pairs_of_texts_without_a_prompt_share_the_words_with_which_they_begin():
    own = dataclasses.replace(DPO, prompt="")
    for chosen, rejected, prompt in (
        ("The sky is blue", "The sky is black", "The sky is"),
        ("yes", "no", ""),
        ("a b", "a b c", "a"),
        ("same words", "same words", "same"),
    ):
        for found, answer in zip(both({"chosen": chosen, "rejected": rejected}, settings=own), (chosen, rejected)):
            assert BYTES.decode(found.inputs) == answer and labels(found) == answer[len(prompt) :]


@pytest.mark.parametrize(
    "example, line",
    [
        ({"prompt": [1, 2], "chosen": "a", "rejected": "b"}, 'prompt must be a list of {"role"'),
        ({"prompt": ASKED, "chosen": [], "rejected": "b"}, 'chosen must be a list of {"role"'),
        (
            {"prompt": ASKED, "chosen": [said("user", "x")], "rejected": [BAD]},
            "no message of `answer` after the prompt",
        ),
        ({"prompt": ASKED, "chosen": [GOOD]}, "has no field 'rejected'"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "has no field 'prompt', which `prompt` names"),
    ],
)
def test_pairs_that_are_no_conversations_are_refused_with_their_place(example, line):
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        both(example)
    assert str(caught.value).startswith("task='dpo': file, example 0: ") and "\n" not in str(caught.value)


def test_preferences_of_all_known_forms_are_the_same_pair():
    known = dataclasses.replace(DPO, prompt="", answer="")
    whole = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
    openai = {"input": {"messages": ASKED, "tools": []}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}
    scored = {"prompt": ASKED, "completions": ["bad", "good", "so so"], "scores": [1, 5.0, 2], "model": "x"}
    expected = both(whole)
    for example in (
        whole,
        {"prompt": "U2", **whole},
        openai,
        scored,
        {**whole, "score_chosen": 9.0, "score_rejected": 1.0},
    ):
        for found, one in zip(both(example, settings=known), expected):
            assert found.inputs.tolist() == one.inputs.tolist() and found.labeled.tolist() == one.labeled.tolist()
    (asked,) = tasks.ask([openai], BYTES, known, dataclasses.replace(ONE, seq_len=200), name="file").prompts
    assert asked.tolist() == expected[0].inputs[: expected[0].prompt].tolist()
    texts = both({"chosen": "The sky is blue", "rejected": "The sky is black"}, settings=known)
    assert list(map(labels, texts)) == [" blue", " black"]


@pytest.mark.parametrize(
    "example, line",
    [
        ({"prompt": "a", "completion": "b", "label": True}, "has one answer that is good or bad (completion, label)"),
        (
            {"a": 1},
            "has no 'chosen' with 'rejected', and no completions or responses or answers with scores or ratings",
        ),
        ({"completions": ["a", "b"], "scores": [1, 1]}, "all scores are alike (1)"),
        ({"completions": ["a", "b"], "scores": [1]}, "scores must be a number for each of completions"),
        (
            {"question": "q", "chosen": "a", "rejected": "b"},
            "has no 'prompt', and its answers begin with no words alike; its fields: question, chosen",
        ),
        ({"chosen": "a", "rejected": "b", "images": ["x"]}, "has 'images', and models read text alone here"),
    ],
)
def test_what_is_no_preference_is_refused_by_name(example, line):
    with pytest.raises(UserError, match=re.escape(line)):
        both(example, settings=dataclasses.replace(DPO, prompt="", answer=""))


def test_a_field_within_a_field_is_named_with_dots():
    settings = dataclasses.replace(SETTINGS, prompt="{q.text}", answer="{reward_model.ground_truth}")
    rows = [{"q": {"text": "one"}, "reward_model": {"ground_truth": 4, "style": "rule"}, "images": ["not read"]}]
    (found,) = encode(rows, ONE, settings).examples
    assert BYTES.decode(found.inputs) == "one4" and found.answer == "4"
    assert encode([{"q.text": "a", "reward_model.ground_truth": "b"}], ONE, settings).examples[0].answer == "b"
    with pytest.raises(UserError, match=r"has no field 'q.text', which `prompt` names"):
        encode([{"q": 3, "reward_model": {"ground_truth": "a"}}], ONE, settings)


def test_an_example_without_a_prompt_is_not_asked():
    rows = [{"rejected": [BAD], "text": "one"}]
    with pytest.raises(UserError, match=r"file, example 0: has no prompt, .*; its fields: rejected, text$"):
        tasks.ask(rows, BYTES, dataclasses.replace(DPO, prompt=""), ONE, name="file")


def test_a_prompt_of_messages_and_an_answer_of_text_are_a_conversation_and_a_template_without_one_is_told():
    settings = dataclasses.replace(SETTINGS, prompt="{text}")
    found = encode([{"text": ASKED, "label": "yes"}], dataclasses.replace(ONE, seq_len=200), settings)
    assert tasks.chat_of(BYTES, settings, ONE, None) == ((), found.template) and found.template
    assert labels(found.examples[0]) == "yes" and found.notes == [
        "conversations are written in zerojax's plain chat template"
    ]
    arrays = {"text": np.array("one", object), "label": np.array("yes", object)}  # as some datasets have texts
    assert encode([arrays], ONE).examples[0].inputs.tolist() == encode(EXAMPLES, ONE).examples[0].inputs.tolist()
    alone = encode([arrays], ONE, settings).examples[0]
    assert BYTES.decode(alone.inputs) == "oneyes"
    assert "`chat_template=plain` has no effect: file has no conversation" in encode(EXAMPLES, ONE).notes


def test_answers_of_a_classification_are_those_of_the_training_examples():
    settings = dataclasses.replace(SETTINGS, task="classification", labels=("no", "yes"))
    found = encode([{"text": "a", "label": 1}, {"text": "b", "label": 0}], ONE, settings)
    assert found.answers == ("yes", "no")
    with pytest.raises(UserError, match=re.escape("file, example 0: the answer 'maybe' is none of the 2 classes")):
        encode([{"text": "a", "label": "maybe"}], ONE, dataclasses.replace(settings, labels=()), known=found.answers)


@pytest.mark.parametrize("form", [ONE, PAIR, dataclasses.replace(ONE, classes=("yes",))])
def test_a_text_that_the_tokenizer_cannot_encode_is_named(tmp_path, form):
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE({"</s>": 0}, [])).save(str(path))
    own, rows = tokenizer.load_tokenizer(str(path)), [EXAMPLES[0], {"text": "\ud800", "label": "yes"}]
    for take in (tasks.ask, tasks.encode):
        with pytest.raises(UserError, match=r"^file, example 1: .* cannot encode .*; mend the text"):
            take(rows, own, SETTINGS, form, name="file")


def test_an_answer_without_a_field_is_refused():
    with pytest.raises(UserError, match=r"answer: 'yes' names no field"):
        encode(EXAMPLES, ONE, dataclasses.replace(SETTINGS, answer="yes"))


def test_an_example_without_a_conversation_is_named():
    with pytest.raises(UserError, match=r"file, example 0: has no field 'messages', .*; its fields: text, label$"):
        encode(EXAMPLES, ONE, dataclasses.replace(SETTINGS, task="chat"))


def test_another_label_is_another_fingerprint():
    other = [{"text": "one", "label": "yes"}, {"text": "two", "label": "oh"}]
    assert encode(EXAMPLES, ONE).fingerprint() != encode(other, ONE).fingerprint()
    assert np.array_equal(encode(EXAMPLES, ONE).examples[1].inputs, encode(EXAMPLES, ONE).examples[1].inputs)


@pytest.mark.parametrize("kind", ["plain", "chatml"])
def test_what_follows_a_drawn_answer_is_what_a_conversation_has_there(tmp_path, kind):
    own, folder, ends = BYTES, None, [END]
    if kind == "chatml":
        folder = chats.write(tmp_path / "chat", "byte_level", chats.CHATML)
        own = tokenizer.load_tokenizer(str(folder / "tokenizer.json"))
        ends = own.encode_special("<|im_end|>").tolist()
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, ("what", "it is", "and", "good"))]
    form = tasks.RowForm(False, 200, 8, 0, ends[0], None, tuple(ends))
    settings = dataclasses.replace(CHAT, chat_template="auto")
    (found,) = tasks.encode([{"messages": messages}], own, settings, form, name="file", folder=folder).examples
    chat, _ = templates.chat_of(folder, "auto")
    for cut in (False, True):
        before = found.inputs[: found.prompt].tolist()
        last = 1 if cut else ends[0]
        following = tasks.following(chat, own, ends[0], messages[2:3], last)
        assert before[-len(following) :] == following
        assert following[0] == ends[0] if cut else before[-len(following) - 1] == ends[0]
