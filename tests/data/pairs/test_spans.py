"""Checks where answers are found in rendered conversations. This module tests zerojax.data.pairs.spans."""

import json
import re

import numpy as np
import pytest

from zerojax.data.pairs import spans, templates
from zerojax.errors import UserError

A, U, S, T = "assistant", "user", "system", "tool"
CHATML = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content }}{{ '<e>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Drops the reasoning of all answers but those after the user's last message.
DROPS = (
    "{% set n = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.index0 > n.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] | trim }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<e>\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKS = DROPS.replace(
    "{% if add_generation_prompt %}<assistant>", "{% if add_generation_prompt %}<assistant><think>\n"
)
END_ONCE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% else %}</s>{% endif %}"
)
INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}{{ '[I] ' + m.content + ' [/I]' }}{% else %}"
    "{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
MARKED = CHATML.replace(
    "{{ m.content }}{{ '<e>\n' }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<e>{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}",
)

# What is said beside a call is there while no answer follows, as in gpt-oss and Mistral, and a result without a call is refused.
QUIET_CALLS = (
    "{% set n = namespace(called=false) %}{% for m in messages %}{% if m.role != 'assistant' %}"
    "{% if m.role == 'tool' and not n.called %}{{ raise_exception('no call') }}{% endif %}<{{ m.role }}>{{ m.content }}<e>"
    "{% elif m.tool_calls %}{% set n.called = true %}{% if loop.last %}<a>{{ m.content }}<e>{% endif %}"
    "{% set call = m.tool_calls[-1].function %}"
    "<a>to={{ call.name }} {{ call.arguments | tojson }}<c>{% else %}<a>=final {{ m.content }}{{ '<r>' if loop.last else '<e>' }}"
    "{% endif %}{% endfor %}{{ '<a>' if add_generation_prompt }}"
)


def turns(*said):
    return [
        {"role": role, **(content if isinstance(content, dict) else {"content": content})} for role, content in said
    ]


def places(text):
    """Returns the places of what stands in angle brackets."""
    return np.array([found.span() for found in re.finditer(r"<[^<>]*>", text)], int).reshape(-1, 2)


def learned(source, messages, learn=spans.ALL, begin=0):
    chat = templates.JinjaChat({"default": source}, {}, "folder")
    talk = spans.Talk(chat, messages, {}, places)
    assert talk.text == chat(messages, False)
    return [talk.text[first:end] for first, end in talk.learned(spans.wanted(messages, begin, learn), learn)]


TWO = turns((S, "s"), (U, "hi"), (A, "one"), (U, "hi"), (A, "one"), (U, "more"))


@pytest.mark.parametrize(
    "source, expected",
    [
        (CHATML, ["one<e>\n", "one<e>\n"]),
        (DROPS, ["one<e>\n", "one<e>\n"]),
        (THINKS, ["one<e>\n", "one<e>\n"]),
        (MARKED, ["one<e>", "one<e>"]),
        (END_ONCE, ["one\n", "one\n"]),
    ],
)
def test_an_answer_is_its_text_with_the_token_that_ends_it(source, expected):
    assert learned(source, TWO) == expected
    assert learned(source, TWO, spans.LAST) == expected[-1:]
    assert learned(source, TWO, begin=3) == expected[-1:]
    silent = [{**message, "weight": 0} if number == 2 else message for number, message in enumerate(TWO)]
    assert learned(source, silent) == expected[-1:]


def test_an_end_that_stands_once_belongs_to_the_last_answer_and_a_template_may_have_no_header():
    assert learned(END_ONCE, TWO[:5]) == ["one\n", "one\n</s>"]
    assert learned(INST, TWO[1:5]) == [" one</s>", " one</s>"]


def thought(content, reasoning):
    return {"content": content, "reasoning_content": reasoning}


TOOLS = turns(
    (U, "q"),
    (A, {**thought("", "look"), "tool_calls": [{"function": {"name": "f"}}]}),
    (T, "t"),
    (A, thought("a1", "so")),
    (U, "q2"),
    (A, thought("a2", "then")),
)


@pytest.mark.parametrize("source", [DROPS, THINKS])
def test_reasoning_that_a_template_drops_from_earlier_answers_is_not_learned_there(source):
    begins = "" if source is THINKS else "<think>then</think>"
    expected = ["<call>f</call><e>\n", "a1<e>\n", f"{begins}a2<e>\n"]
    found = learned(source, TOOLS)
    assert found[:2] == expected[:2] and found[2].endswith("a2<e>\n") and "then" in found[2]
    if source is DROPS:
        assert found == expected
    assert learned(source, TOOLS, spans.NO_REASONING) == ["<call>f</call><e>\n", "a1<e>\n", "a2<e>\n"]
    inside = turns((U, "q"), (A, "<think>x</think>\n\nanswer"))
    assert learned(CHATML, inside, spans.NO_REASONING) == ["answer<e>\n"]
    assert learned(CHATML, inside) == ["<think>x</think>\n\nanswer<e>\n"]


def test_an_end_of_the_last_message_that_begins_as_the_next_message_does_is_told_apart():
    ends_last = CHATML.replace(
        "{{ '<e>\n' }}", "{{ '<e>' }}{% if loop.last and not add_generation_prompt %}<use>{% endif %}"
    )
    assert learned(ends_last, TWO[1:5]) == ["one<e>", "one<e><use>"]
    other = CHATML.replace("{{ '<e>\n' }}", "{% if loop.last and m.role == 'assistant' %}<end>{% else %}<e>{% endif %}")
    assert learned(other, TWO[1:5]) == ["one<e>", "one<end>"]


def test_an_end_is_told_from_that_of_what_stands_before_all_messages():
    other = CHATML.replace("{{ '<e>\n' }}", "{% if loop.last and m.role == 'assistant' %}<end>{% else %}<e>{% endif %}")
    assert learned("<system>be good<e>" + other, TWO[1:5]) == ["one<e>", "one<end>"]
    endless = CHATML.replace("{{ '<e>\n' }}", "")
    assert learned("<begin>" + endless, TWO[1:5]) == ["one", "one"]


def test_what_a_tool_says_inside_of_the_message_that_calls_it_is_not_learned():
    inside = (
        "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{% for c in m.tool_calls or [] %}<call>"
        "{{ c.function.arguments }}</call>{% endfor %}{% if m.tool_calls and not loop.last %}"
        "<said>{{ messages[loop.index].content }}</said>{% endif %}{{ m.content }}<e>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}
    assert learned(inside, turns((U, "q"), (A, call), (T, "t"), (A, "a"))) == ["<call>x</call>", "a<e>"]
    with pytest.raises(UserError, match="message 2 of 4 cannot be found"):
        learned(inside, turns((U, "q"), (A, {**call, "content": "let me see"}), (T, "t"), (A, "a")))


def test_a_header_that_asks_for_more_than_answers_begin_with_ends_where_it_differs():
    empty = CHATML.replace("{{ m.content }}", "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}")
    asks = empty.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}")
    assert learned(asks, TWO[1:5]) == ["</think>one<e>\n", "</think>one<e>\n"]


def test_answers_of_several_marked_parts_lose_their_own_reasoning():
    twice = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}<think>{{ m.reasoning_content }}</think>"
        "{% endgeneration %}{% generation %}{{ m.content }}<e>{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    said = turns((U, "q"), (A, thought("a1", "r1")), (U, "q"), (A, thought("a2", "r2")))
    assert learned(twice, said) == ["<think>r1</think>", "a1<e>", "<think>r2</think>", "a2<e>"]
    assert learned(twice, said, spans.LAST) == ["<think>r2</think>", "a2<e>"]
    assert learned(twice, said, spans.NO_REASONING) == ["a1<e>", "a2<e>"]


def test_an_answer_that_a_template_leaves_out_or_writes_twice_is_refused():
    silent = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}{{ messages | length }}"
    )
    with pytest.raises(UserError, match=r"message 3 of 6 cannot be found in the text .*; mark answers"):
        learned(silent, TWO)


def test_answers_alike_and_empty_are_told_apart():
    same = turns((U, "x"), (A, ""), (U, ""), (A, "x"), (U, "x"), (A, ""))
    for source in (CHATML, DROPS, MARKED):
        assert [part.rstrip("\n") for part in learned(source, same)] == ["<e>", "x<e>", "<e>"]


@pytest.mark.parametrize("arguments", [{"x": 1, "y": "two"}, {}, '{"x": 1}'], ids=["table", "empty", "text"])
def test_a_call_whose_content_the_template_drops_is_found_by_its_arguments(arguments):
    calls = [{"type": "function", "function": {"name": "add", "arguments": one}} for one in ({"z": 0}, arguments)]
    said = {"content": "let me see", "tool_calls": calls}
    call = f"to=add {json.dumps(arguments)}<c>"
    asked = [(U, "1 and 2?"), (A, said)]
    assert learned(QUIET_CALLS, turns(*asked)) == ["let me see<e><a>" + call]
    assert learned(QUIET_CALLS, turns(*asked, ("tool", "3"), (A, "3"))) == [call, "=final 3<r>"]
    twice = turns(*asked, ("tool", "3"), (A, said), ("tool", "3"), (A, "3"), (U, "so"), (A, "3"))
    assert learned(QUIET_CALLS, twice) == [call, call, "=final 3<e>", "=final 3<r>"]
