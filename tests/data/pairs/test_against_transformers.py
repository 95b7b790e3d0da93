"""Compares the tokens of conversations, and what is learned of them, with transformers and TRL. This module tests zerojax.data.pairs.tasks.

What is learned is told by a template's marks. A template without marks is judged by the same template with them, and, where the texts of a
conversation's beginnings tell the answers, by those.
"""

import collections
import functools
import json
import shutil
from typing import Any, NamedTuple

import chats
import golden_models
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import rows, tasks
from zerojax.errors import UserError

SETTINGS = tasks.TaskSettings("chat", "", "", (), "messages", "own")
LONG = 1 << 20  # tokens, more than any conversation has
BATCH = 8  # conversations that are encoded together, with one process of their template
# (template, whether it keeps its marks)
CASES = [(name, kept) for name, made in chats.TEMPLATES.items() for kept in (True, False)[: 2 - made.is_marked]]
NAMES = [f"{name}-{'marked' if kept else 'unmarked'}" for name, kept in CASES]
TRL = golden_models.GOLDEN / "trl"


class Case(NamedTuple):
    """A tokenizer's folder, as transformers and zerojax read it."""

    folder: Any
    template: chats.Template
    is_marked: bool
    hf: Any
    own: tokenizer_lib.Tokenizer

    def render(self, example, messages, **options):
        """Returns the text that transformers renders of some messages."""
        return self.hf.apply_chat_template(messages, tools=example.get("tools"), tokenize=False, **options)

    def form(self, seq_len=LONG):
        """Returns the form of a decoder's rows."""
        end = self.hf.eos_token_id
        return tasks.RowForm(False, seq_len, seq_len, 0, end, None, (end,))

    def encode(self, examples, seq_len=LONG):
        """Returns what zerojax makes of examples."""
        return tasks.encode(examples, self.own, SETTINGS, self.form(seq_len), name="x", folder=self.folder).examples


def read(folder):
    """Returns transformers' tokenizer of a folder. Imports it here: at the top, each process of the tests would import it, for a second."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def opened(folder, template, is_marked=True):
    """Returns the case of a folder."""
    own = tokenizer_lib.load_tokenizer(str(folder / "tokenizer.json"))
    return Case(folder, template, is_marked, read(folder), own)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Returns what makes the folder of a kind, a template and a form."""
    root = tmp_path_factory.mktemp("chats")

    @functools.cache
    def made(kind, name, is_marked, form):
        template = chats.TEMPLATES[name]
        source = template.source if is_marked else chats.unmarked(template.source)
        folder = chats.write(root / f"{kind}-{name}-{is_marked}-{form}", kind, source, form)
        return opened(folder, template, is_marked)

    return made


def expected(case, example):
    """Returns the ids of transformers, and which are learned; None where the template refuses the conversation."""
    messages, tools = example["messages"], example.get("tools")
    try:
        ids = case.hf.apply_chat_template(messages, tools=tools, tokenize=True)["input_ids"]
    except Exception:  # a template may raise anything
        return None
    chosen = case.hf.get_chat_template(tools=tools).replace(chats.unmarked(case.template.source), case.template.source)
    marked = case.hf.apply_chat_template(
        messages, tools=tools, chat_template=chats.weighed(chosen), return_assistant_tokens_mask=True
    )
    assert marked["input_ids"] == ids
    return ids, first_apart(marked["assistant_masks"])


def first_apart(mask):
    """Returns a mask whose first token is not learned. By design: nothing is before it, from which it could be told."""
    return [at > 0 and bool(value) for at, value in enumerate(mask)]


def told(case, example):
    """Returns which tokens are learned, as the texts of a conversation's beginnings tell it; None where they do not.

    An answer is what follows the text of the messages before it, with the header that asks for an answer, in the text up to and with
    it. Both must be beginnings of the whole text. They are not where a template drops earlier reasoning, ends the last message alone, or
    asks for an answer with another header than it writes.
    """
    messages, spans = example["messages"], []
    whole = case.render(example, messages)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before = case.render(example, messages[:number], add_generation_prompt=True)
            after = case.render(example, messages[: number + 1])
        except Exception:  # a template may refuse a beginning
            return None
        if not (whole.startswith(after) and after.startswith(before)):
            return None
        if is_learned(message):
            spans.append((len(before), len(after)))
    offsets = case.hf(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return first_apart(any(begin < last and end > first for first, last in spans) for begin, end in offsets)


def is_learned(message):
    return message["role"] == "assistant" and message.get("weight") != 0 and message.get("train") is not False


def declined(case, example, right):
    """Returns words of the line with which zerojax refuses an example; None for one that it must take."""
    messages = example["messages"]
    if right is None:
        return ""
    if all(message["role"] != "assistant" for message in messages):
        return "no message is the assistant's"
    learned = [message for message in messages if is_learned(message)]
    if not learned:
        return "weight of 0"
    alone = [{**message, "weight": 0} if message is not learned[-1] else message for message in messages]
    return None if any(expected(case, {**example, "messages": alone})[1]) else "no token of its last answer"


def refusal(case, example):
    """Returns the line with which zerojax refuses an example; None if it takes it."""
    try:
        case.encode([example])
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


def compare(case, examples):
    """Compares examples, and returns how many have the same ids and mask, are refused as they must be, and cannot be told."""
    counts, taken = collections.Counter(), []
    for example in examples:
        right = expected(case, example)
        words = declined(case, example, right)
        if words is None:
            taken.append((example, right))
            continue
        line = refusal(case, example)
        assert line is not None and words in line, f"{case.folder.name}: {line}: {json.dumps(example)}"
        counts["refused"] += 1
    try:
        found = case.encode([example for example, _ in taken])
    except UserError:
        found = [None if refusal(case, example) else case.encode([example])[0] for example, _ in taken]
    for (example, right), mine in zip(taken, found):
        reference = None if case.template.is_marked else told(case, example)
        assert reference in (None, right[1])  # else the marks of the test's template are wrong
        if mine is None:
            assert not case.is_marked and reference is None, f"{refusal(case, example)}: {json.dumps(example)}"
        else:
            ours = mine.inputs.tolist(), mine.labeled.tolist()
            assert ours == right, difference(case, example, right, ours)
        counts["untold" if mine is None else "same"] += 1
    return counts


def difference(case, example, right, ours):
    """Returns both readings of an example, with a star before each token that is learned."""
    lines = [
        " ".join("*" * learned + repr(case.hf.convert_ids_to_tokens(number)) for number, learned in zip(*pair))
        for pair in (right, ours)
    ]
    return f"{case.folder.name}: {json.dumps(example)}\nright: {lines[0]}\nours:  {lines[1]}"


def judge(case, number, batches, *phases):
    """Compares random conversations of a case, and returns the counts of `compare`."""
    name, is_marked = CASES[number]
    template, total = chats.TEMPLATES[name], collections.Counter()

    @hypothesis.seed(number)  # derandomize would draw the same kinds for each case
    @hypothesis.settings(max_examples=batches, deadline=None, database=None, phases=phases)
    @hypothesis.given(
        st.sampled_from(list(chats.KINDS)),
        st.sampled_from(list(chats.FORMS)),
        st.lists(chats.conversations(template), min_size=BATCH, max_size=BATCH),
    )
    def judged(kind, form, examples):
        total.update(compare(case(kind, name, is_marked, form), examples))

    judged()
    return total


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_conversations_have_the_tokens_of_transformers_and_the_answers_are_learned(case, number):
    counts = judge(case, number, 3, hypothesis.Phase.generate)
    assert counts["same"] > counts["refused"] + counts["untold"]


@pytest.mark.parametrize(("name", "kept"), CASES, ids=NAMES)
def test_of_a_conversation_that_an_answer_begins_no_preamble_is_learned(case, name, kept):
    made = case("byte_level", name, kept, "today")
    counts = compare(made, [{"messages": TALK[2:]}, {"messages": TALK[2:3]}])
    assert counts["same"] + counts["refused"] == 2
    assert counts["refused"] == 2 * (name == "alternating")


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_ten_thousand_conversations_have_the_tokens_of_transformers(case, number):
    counts = judge(case, number, 60, hypothesis.Phase.generate)
    assert counts["same"] >= 10_000 / len(CASES)
    assert counts["untold"] < counts["same"] / 20


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.sampled_from(list(chats.KINDS)),
    st.sampled_from(["chatml", "trimmed", "end_only"]),
    st.lists(chats.conversations(chats.TEMPLATES["chatml"]), min_size=BATCH, max_size=BATCH),
    st.integers(8, 60),
)
def test_a_long_conversation_loses_its_beginning_and_what_follows_its_last_answer(case, kind, name, examples, seq_len):
    made = case(kind, name, True, "today")
    pairs = [(example, expected(made, example)) for example in examples]
    taken = [example for example, right in pairs if declined(made, example, right) is None]
    for whole, row in zip(made.encode(taken), made.encode(taken, seq_len)):
        ids, learned = whole.inputs, np.flatnonzero(whole.labeled)
        most, head = seq_len + 1, int(ids[0] == made.hf.bos_token_id)
        if len(ids) <= most:
            assert np.array_equal(row.inputs, ids) and np.array_equal(row.labeled, whole.labeled)
            continue
        end = min(learned[-1] + 1, whole.prompt + most - head - 1)  # with a token of the prompt before a longer answer
        kept = [*range(head), *range(max(head, end - most + head), end)]
        assert row.inputs.tolist() == ids[kept].tolist()
        assert row.labeled.tolist() == first_apart(whole.labeled[kept])


# {golden family: the kind of its tokenizer, and the class that tokenizer_config.json names}. Marian's tokenizers have no tokenizer.json.
FAMILIES = {
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4moe"), ("byte_fallback", "GemmaTokenizer")
    ),
    **dict.fromkeys(
        ("qwen2", "qwen2moe", "qwen3moe", "qwen3next", "qwen35", "qwen35moe"), ("byte_level", "Qwen2Tokenizer")
    ),
    **dict.fromkeys(("granite", "granitehybrid", "granitemoe", "minimaxm2", "olmo2"), ("gpt2", "GPT2Tokenizer")),
    **dict.fromkeys(
        ("gptoss", "smollm3", "seedoss", "exaone4", "olmo3", "glm4", "glm4moe", "modernbert", "nemotronh", "lfm2"),
        ("byte_level", "PreTrainedTokenizerFast"),
    ),
    **dict.fromkeys(("llama", "llamadynamic", "mixtral"), ("prepend", "LlamaTokenizer")),
    **dict.fromkeys(("phi3", "phi3long", "phimoe"), ("first", "LlamaTokenizer")),
    "ernie45moe": ("first", "LlamaTokenizer"),
    "deepseekv2": ("byte_level", "LlamaTokenizerFast"),
    "llama4": ("byte_level", "PreTrainedTokenizerFast"),
    "deepseekv3": ("byte_level", "LlamaTokenizerFast"),
    "cohere2": ("byte_level", "CohereTokenizer"),
    "ernie45": ("first", "LlamaTokenizer"),
    **dict.fromkeys(("ministral", "ministral3"), ("byte_level", "LlamaTokenizerFast")),
    "starcoder2": ("gpt2", "GPT2Tokenizer"),
    "gpt2": ("gpt2", "GPT2Tokenizer"),
    **dict.fromkeys(("olmoe", "mamba2"), ("byte_level", "GPTNeoXTokenizer")),
    **dict.fromkeys(("bert", "distilbert"), ("wordpiece", "BertTokenizer")),
    "xlmroberta": ("unigram", "XLMRobertaTokenizer"),
    "roberta": ("gpt2", "RobertaTokenizer"),
    "bart": ("gpt2", "BartTokenizer"),
    "mbart": ("unigram", "MBartTokenizer"),
    "pegasus": ("unigram", "PegasusTokenizer"),
    "t5": ("unigram", "T5Tokenizer"),
}
# Whose class runs the file of an earlier transformers otherwise than the file says.
REREAD = ("llama", "llamadynamic")
TALK = [
    {"role": role, "content": f" {role} is good\n"} for role in ("system", "user", "assistant", "user", "assistant")
]


def family(root, name):
    """Returns folders with a golden model's config and its kind of tokenizer: of an earlier transformers, and as transformers saves it."""
    kind, wanted = FAMILIES[name]
    earlier, saved = chats.write(root / "earlier", kind, chats.CHATML, "earlier"), root / "saved"
    path = earlier / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": wanted}))
    shutil.copy(golden_models.FOLDER / name / "config.json", earlier)
    read(earlier).save_pretrained(saved)
    shutil.copy(golden_models.FOLDER / name / "config.json", saved)
    return earlier, saved


def test_each_golden_family_has_a_tokenizer():
    assert {*FAMILIES, "marian"} == {path.name for path in golden_models.FOLDER.iterdir() if path.is_dir()}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_texts_and_conversations_of_golden_families_have_the_tokens_of_transformers(name, tmp_path):
    earlier, saved = family(tmp_path, name)
    for folder in (saved, earlier)[: 1 + (name in REREAD)]:
        made = opened(folder, chats.TEMPLATES["chatml"])
        compare_texts(made)
        assert compare(made, [{"messages": TALK}, {"messages": TALK[1:]}])["same"] == 2


def compare_texts(case):
    """Compares plain texts. A special token's letters in a document are text by design, and that token to transformers: these have none."""

    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @hypothesis.given(chats.texts(chats.PLAIN))
    def compared(text):
        assert case.own.encode_whole(text).tolist() == case.hf(text)["input_ids"]

    compared()


@st.composite
def properties(draw, text):
    """Draws the properties of an added token."""
    return {
        "content": text,
        **{name: draw(st.booleans()) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")},
    }


@st.composite
def named_tokens(draw):
    """Draws added tokens of a tokenizer.json, and the files beside it that name some of them, in the forms of several years."""
    texts = draw(st.lists(st.sampled_from(["<a>", "<b>", "word", "<c>"]), unique=True, max_size=4))
    own = [draw(properties(text)) for text in texts]
    listed = st.lists(st.sampled_from(["<new>", *texts]), unique=True)
    known = st.sampled_from(["<new>", "<é>", *texts])
    keys = draw(st.permutations(["eos_token", "pad_token", "cls_token", "image_token"]))
    names = {key: draw(known) for key in keys if draw(st.booleans())}
    lists = {key: draw(listed) for key in ("additional_special_tokens", "extra_special_tokens") if draw(st.booleans())}
    if draw(st.booleans()):
        lists["extra_special_tokens"] = {"video_token": draw(known)}
    form = draw(st.sampled_from(["tokenizer_config.json", "special_tokens_map.json", "added_tokens_decoder"]))
    if form == "special_tokens_map.json":
        return own, draw(st.booleans()), {"tokenizer_config.json": lists, form: names}, draw(st.booleans())
    return own, draw(st.booleans()), {"tokenizer_config.json": {**names, **lists}}, form == "added_tokens_decoder"


def test_tokens_that_files_name_have_the_properties_of_transformers(tmp_path_factory):
    base = json.loads(chats.file_of("byte_level", added=False))
    first = 1 + max(base["model"]["vocab"].values())

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @hypothesis.given(named_tokens(), st.lists(st.sampled_from(["<a>", "<b>", "word", "<c>", "<new>", " ", "x"])))
    def compared(drawn, pieces):
        own, is_inside, files, is_beside = drawn
        folder, by_id = tmp_path_factory.mktemp("named"), {first + at: token for at, token in enumerate(own)}
        inside = [{"id": number, **token} for number, token in by_id.items()] if is_inside or not is_beside else []
        content = {**base, "added_tokens": [*base["added_tokens"], *inside]}
        files = {"tokenizer.json": content, **files}
        if is_beside and "special_tokens_map.json" in files:  # in the order of letters, as they were saved
            files["added_tokens.json"] = dict(sorted((token["content"], number) for number, token in by_id.items()))
        elif is_beside:
            files["tokenizer_config.json"] = {**files["tokenizer_config.json"], "added_tokens_decoder": by_id}
        for name, value in files.items():
            (folder / name).write_text(json.dumps(value))
        made = opened(folder, chats.TEMPLATES["chatml"])
        right = {number: repr(token) for number, token in made.hf.added_tokens_decoder.items()}
        assert {number: repr(token) for number, token in made.own.model.get_added_tokens_decoder().items()} == right
        text = "".join(pieces)
        assert made.own.encode_special(text).tolist() == made.hf(text, add_special_tokens=False)["input_ids"]

    compared()


def of_trl(kind, asked):
    """Returns the arrays that TRL made, and the folder and the conversations that it made them of."""
    found = np.load(TRL / kind / "expected.npz")
    talks = json.loads((TRL / "talks.json").read_text())
    arrays = {name.split("/")[1]: found[name] for name in found if name.startswith(f"{asked}/")}
    return arrays, opened(TRL / kind, chats.TEMPLATES["chatml"]), [{"messages": messages} for messages in talks]


@pytest.mark.parametrize("kind", ["byte_level", "prepend"])
def test_padded_rows_are_those_of_trl(kind):
    right, made, examples = of_trl(kind, "padded")
    seq_len = right["input_ids"].shape[1] - 1
    found = rows.Rows(made.encode(examples, seq_len), made.form(seq_len), packs=False)
    assert len(found) == len(right["input_ids"])
    for number in range(len(found)):
        row, is_read = found.arrays(number), right["attention_mask"][number]
        assert np.array_equal(row["tokens"], right["input_ids"][number] * is_read)
        assert np.array_equal(row["labeled"], right["labels"][number] != -100)


@pytest.mark.parametrize("kind", ["byte_level", "prepend"])
def test_trl_cuts_a_long_conversations_end_and_zerojax_its_beginning(kind):
    right, made, examples = of_trl(kind, "truncated")
    seq_len = right["input_ids"].shape[1] - 1
    whole, short = made.encode(examples), made.encode(examples, seq_len)
    begins = [example.inputs[: seq_len + 1] for example in whole if example.labeled[: seq_len + 1].any()]
    assert [ids.tolist() for ids in begins] == [
        ids[mask > 0].tolist() for ids, mask in zip(right["input_ids"], right["attention_mask"])
    ]
    for example, row in zip(whole, short):
        end = len(row.inputs) if len(example.inputs) == len(row.inputs) else 1 + np.flatnonzero(example.labeled)[-1]
        assert np.array_equal(row.inputs, example.inputs[end - len(row.inputs) : end])


@pytest.mark.parametrize("kind", ["byte_level", "prepend"])
def test_packed_rows_hold_as_many_tokens_as_those_of_trl(kind):
    right, made, examples = of_trl(kind, "packed")
    begins = np.flatnonzero(right["position_ids"][0] == 0)[1:]
    ids, labels = (np.split(right[name][0], begins) for name in ("input_ids", "labels"))
    seq_len = 89
    found = rows.Rows(made.encode(examples, seq_len), made.form(seq_len), packs=True)
    ours, sizes = [], []
    for number in range(len(found)):
        row = found.arrays(number)
        parts = [row["segments"] == segment for segment in range(1, 1 + row["segments"].max())]
        ours += [(row["tokens"][part].tolist(), row["labeled"][part].astype(bool).tolist()) for part in parts]
        sizes.append(sorted(part.sum() for part in parts))
    assert sorted(ours) == sorted((one.tolist(), (own != -100).tolist()) for one, own in zip(ids, labels))
    trl_sizes = [
        sorted(len(one) for one, row in zip(ids, right["rows"]) if row == number) for number in set(right["rows"])
    ]
    assert sorted(sizes) == sorted(trl_sizes)
