"""Tokenizers, chat templates and random conversations. This module makes small ones of each kind, in folders as transformers saves them.

A template is written with `{%- generation -%}` around what the model is to write. `unmarked` takes the marks out, so that both forms of a
template render the same text, and the marks tell what is to be learned of either.
"""

import functools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hypothesis.strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

WORDS = """
system user assistant tool USER ASSISTANT INST name arguments parameters function content think Today is the weather in Paris warm
and good , yes no list of numbers 1 12 2024 ; :
a b c d e f g h i j k l m n o p q r s t u v w x y z A B C D E F G H I J K L M N O P Q R S T U V W X Y Z
Be brief . What is that ? It is good { " [ / ] } < | > _ - # ! ' * + = ( ) & % é ü ß 中 文
"""
CORPUS = [
    *WORDS.strip().split("\n"),
    *WORDS.split(),
    "### user\nthe weather\n\n### assistant\nis good\n\n",
    " \n \n\n",
] * 4
SPLIT = r"'(?:s|t|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPACE = "▁"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class Names(NamedTuple):
    """The special tokens of a tokenizer."""

    bos_token: str = "<s>"
    eos_token: str = "</s>"
    unk_token: str = "<unk>"
    pad_token: str = "<pad>"


BERT = Names("[CLS]", "[SEP]", "[UNK]", "[PAD]")
# Tokens that templates write out, and some that look at the text around them.
ADDED = [
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("<|user|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|assistant|>", special=True, normalized=False, rstrip=True),
    AddedToken("<think>", special=False, normalized=False),
    AddedToken("</think>", special=False, normalized=False),
    AddedToken("<tool_call>", special=False, normalized=True),
    AddedToken("<mask>", special=True, normalized=False, lstrip=True),
    AddedToken("<both>", special=True, normalized=True, lstrip=True, rstrip=True),
    AddedToken("word", special=False, normalized=True, single_word=True),
]


def byte_level() -> Tokenizer:
    """Returns byte-level BPE with a split of words, as Llama 3 and Qwen have it."""
    made = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    made.decoder = decoders.ByteLevel()
    _train(made, trainers.BpeTrainer, [*Names()], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), _begins(made)])
    return made


def gpt2() -> Tokenizer:
    """Returns byte-level BPE whose tokens' places in a text leave out their spaces, as GPT-2 has it."""
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def prepend() -> Tokenizer:
    """Returns SentencePiece's BPE with a space before each text between special tokens, as the files of Llama 2 have it."""
    made = _sentence_bpe()
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    made.pre_tokenizer = None
    return made


def metaspace(scheme: str) -> Tokenizer:
    """Returns SentencePiece's BPE with a space before the first text, each text or none ("first", "always", "never")."""
    made = _sentence_bpe()
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    return made


def byte_fallback() -> Tokenizer:
    """Returns SentencePiece's BPE without a space before, as Gemma has it."""
    made = _sentence_bpe()
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return made


def unigram() -> Tokenizer:
    """Returns SentencePiece's Unigram, which ends a text, as T5 has it."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always")
    made.decoder = decoders.Metaspace(SPACE, prepend_scheme="always")
    _train(made, trainers.UnigramTrainer, ["<pad>", "</s>", "<unk>", "<s>"], unk_token="<unk>")
    made.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", made.token_to_id("</s>"))])
    return made


def wordpiece() -> Tokenizer:
    """Returns WordPiece without case, as BERT has it."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    _train(made, trainers.WordPieceTrainer, ["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    ends = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    return made


def _sentence_bpe() -> Tokenizer:
    """Returns BPE over words with "▁" for spaces, and bytes for letters that it does not know."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE)
    _train(made, trainers.BpeTrainer, [*Names(), *BYTES])
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in BYTES]
    made = Tokenizer.from_str(json.dumps(content))
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.post_processor = _begins(made)
    return made


def _begins(made: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])


def _train(made: Tokenizer, trainer: Callable[..., Any], special: list[str], **options: Any) -> None:
    made.train_from_iterator(CORPUS, trainer(vocab_size=700, special_tokens=special, show_progress=False, **options))


# {kind: its tokenizer}: six kinds, some in several forms
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "gpt2": gpt2,
    "prepend": prepend,
    "first": functools.partial(metaspace, "first"),
    "always": functools.partial(metaspace, "always"),
    "never": functools.partial(metaspace, "never"),
    "byte_fallback": byte_fallback,
    "unigram": unigram,
    "wordpiece": wordpiece,
}


@functools.cache
def file_of(kind: str, added: bool = True) -> str:
    """Returns the contents of a kind's tokenizer.json; `added`: whether ADDED is in it."""
    made = KINDS[kind]()
    if added:
        made.add_tokens(ADDED)
        made.add_special_tokens([token for token in ADDED if token.special])
    return made.to_str()


def names_of(kind: str) -> dict[str, str]:
    """Returns the special tokens of a kind, by their names in tokenizer_config.json."""
    return (BERT if kind == "wordpiece" else Names())._asdict()


class Template(NamedTuple):
    """A chat template with marks around what is learned.

    Attributes:
      source: the template.
      has_system: whether it takes a system message.
      has_tools: whether it writes calls of tools.
      has_thoughts: whether it writes reasoning.
      has_parts: whether it takes a list of parts as a content.
      is_marked: whether its marks are others than the texts of its beginnings tell, so that it is tried with marks alone.
    """

    source: str
    has_system: bool = True
    has_tools: bool = False
    has_thoughts: bool = False
    has_parts: bool = False
    is_marked: bool = False


CHATML = r"""
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}{{- (message.content or '') + '<|im_end|>\n' -}}{%- endgeneration -%}
  {%- else -%}
    {{- (message.content or '') + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
TRIMMED = r"""
{{- bos_token -}}
{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + '<|im_end|>\n\n' -}}
  {%- if message['role'] == 'assistant' -%}
    {%- generation -%}{{- message['content'] | trim + eos_token -}}{%- endgeneration -%}
  {%- else -%}
    {{- message['content'] | trim + eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant<|im_end|>\n\n' -}}{%- endif -%}
"""
ALTERNATING = r"""
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}
{{- bos_token -}}
{%- for message in turns -%}
  {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
    {{- raise_exception('roles must alternate') -}}
  {%- endif -%}
  {%- if message.role == 'user' -%}
    {{- '[INST] ' + (first if loop.first else '') + message.content + ' [/INST]' -}}
  {%- else -%}
    {%- generation -%}{{- ' ' + message.content.strip() + eos_token -}}{%- endgeneration -%}
  {%- endif -%}
{%- endfor -%}
"""
NO_SYSTEM = r"""
{%- if messages and messages[0]['role'] == 'system' -%}{{- raise_exception('no system role') -}}{%- endif -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' -%}
    {{- '<|im_start|>model\n' -}}
    {%- generation -%}{{- message['content'] | trim + '<|im_end|>\n' -}}{%- endgeneration -%}
  {%- else -%}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>model\n' -}}{%- endif -%}
"""
REASONING = r"""
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools or has_system -%}
  {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if has_system else '') -}}
  {%- for tool in tools or [] -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else '' -%}
  {%- if message.role == 'assistant' -%}
    {%- set thought = message.reasoning_content if message.reasoning_content is string else '' -%}
    {%- if '</think>' in content -%}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- generation -%}
      {%- if loop.index0 > ns.last and (loop.last or thought) -%}
        {{- '<think>\n' + thought + '\n</think>\n\n' + content -}}
      {%- else -%}
        {{- content -}}
      {%- endif -%}
      {%- for call in message.tool_calls or [] -%}
        {%- set call = call.function if call.function else call -%}
        {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
        {{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}\n' -}}
      {%- endfor -%}
      {{- '<|im_end|>\n' -}}
    {%- endgeneration -%}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' -}}
    {{- '\n<both>\n' + content -}}
    {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' -}}
  {%- elif not (loop.first and has_system) -%}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
THOUGHT_PROMPT = r"""
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' -%}
    {{- '<|assistant|>' -}}
    {%- generation -%}{{- message['content'].split('</think>')[-1] + eos_token -}}{%- endgeneration -%}
  {%- elif message['role'] == 'system' -%}
    {{- message['content'] -}}
  {%- else -%}
    {{- '<|user|>' + message['content'] -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>Thought:\n' -}}{%- endif -%}
"""
_TURNS = r"""
{%- for message in turns -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}{{- message.content + '<|im_end|>\n' -}}{%- endgeneration -%}
  {%- else -%}
    {{- message.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
DATED = r"""
{{- '<|im_start|>system\nToday is ' + strftime_now('%d %B %Y') + '.<|im_end|>\n' -}}
{%- set turns = messages -%}
"""
DATED += _TURNS
PREAMBLE = r"""
{%- set has_system = messages[0].role == 'system' -%}
{{- '<|im_start|>system\n' + (messages[0].content if has_system else 'Be brief.') + '<|im_end|>\n' -}}
{%- set turns = messages[1:] if has_system else messages -%}
"""
PREAMBLE += _TURNS
END_ONLY = r"""
{%- for message in messages -%}
  {{- '### ' + message.role + '\n' -}}
  {%- set end = eos_token if loop.last and not add_generation_prompt else '' -%}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}{{- message.content + '\n\n' + end -}}{%- endgeneration -%}
  {%- else -%}
    {{- message.content + '\n\n' + end -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### assistant\n' -}}{%- endif -%}
"""
END_AFTER = r"""
{%- for message in messages -%}
  {%- set end = '<|im_end|>\n' + (eos_token if loop.last and not add_generation_prompt else '') -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|assistant|>' -}}
    {%- generation -%}{{- message.content + end -}}{%- endgeneration -%}
  {%- else -%}
    {{- '<|user|>' + message.content + end -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
OTHER_END = r"""
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}{{- message.content + (eos_token if loop.last else '<|im_end|>') -}}{%- endgeneration -%}
  {%- else -%}
    {{- message.content + '<|im_end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
PARTS = r"""
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.content is string -%}
    {%- set text = message.content -%}
  {%- else -%}
    {%- set ns = namespace(text='') -%}
    {%- for part in message.content or [] -%}
      {%- if part.type != 'text' -%}{{- raise_exception('only texts') -}}{%- endif -%}
      {%- set ns.text = ns.text + part.text -%}
    {%- endfor -%}
    {%- set text = ns.text -%}
  {%- endif -%}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}
      {{- text -}}
      {%- for call in message.tool_calls or [] -%}{{- call | tojson(separators=(',', ':')) -}}{%- endfor -%}
      {{- '<|im_end|>\n' -}}
    {%- endgeneration -%}
  {%- else -%}
    {{- text + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
CALLS = r"""
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.tool_calls is defined -%}
    {%- if message.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
    {%- set call = message.tool_calls[0].function -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- generation -%}
      {{- {'name': call.name, 'parameters': call.arguments} | tojson(indent=1) + '<|im_end|>' -}}
    {%- endgeneration -%}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>ipython\n' + message.content | tojson + '<|im_end|>' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- if tools and loop.first -%}{{- tools | tojson(indent=2) + '\n' -}}{%- endif -%}
    {{- message.content + '<|im_end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
LAST_TOOLS = r"""
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}
      {%- if message.tool_calls -%}
        {{- '[CALLS] ' -}}
        {%- for call in message.tool_calls -%}{{- call.function | tojson(sort_keys=true) + (',' if not loop.last else '') -}}{%- endfor -%}
      {%- else -%}
        {{- ' ' + message.content | trim -}}
      {%- endif -%}
      {{- eos_token -}}
    {%- endgeneration -%}
  {%- elif message.role == 'tool' -%}
    {{- '[RESULTS] ' + {'content': message.content, 'id': message.tool_call_id} | tojson + '[/RESULTS]' -}}
  {%- else -%}
    {%- if tools and loop.index0 == ns.last -%}{{- '[TOOLS] ' + tools | tojson + '[/TOOLS]' -}}{%- endif -%}
    {{- '[INST] ' + message.content + '[/INST]' -}}
  {%- endif -%}
{%- endfor -%}
"""
IN_LOOP = r"""
{%- for message in messages -%}
  {%- if message['role'] == 'assistant' -%}
    {{- '<|assistant|>\n' -}}
    {%- generation -%}{{- message['content'] + eos_token + '\n' -}}{%- endgeneration -%}
  {%- else -%}
    {{- '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' -}}
  {%- endif -%}
  {%- if loop.last and add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}
{%- endfor -%}
"""
WORDS_ONLY = r"""
{%- for message in messages -%}
  {%- if message.role == 'system' -%}
    {{- message.content + ' ' -}}
  {%- elif message.role == 'user' -%}
    {{- 'USER: ' + message.content + ' ' -}}
  {%- elif message.role == 'assistant' -%}
    {{- 'ASSISTANT:' -}}
    {%- generation -%}{{- ' ' + message.content + eos_token -}}{%- endgeneration -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""
HALF = r"""
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n<think>' + (message.reasoning_content or '') + '</think>' -}}
    {%- generation -%}{{- (message.content or '') + '<|im_end|>' -}}{%- endgeneration -%}
    {{- '\n' -}}
    {%- for call in message.tool_calls or [] -%}
      {%- generation -%}{{- call | tojson -}}{%- endgeneration -%}
    {%- endfor -%}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

TEMPLATES = {
    "chatml": Template(CHATML),
    "trimmed": Template(TRIMMED),
    "alternating": Template(ALTERNATING),
    "no_system": Template(NO_SYSTEM, has_system=False),
    "reasoning": Template(REASONING, has_tools=True, has_thoughts=True),
    "thought_prompt": Template(THOUGHT_PROMPT),
    "dated": Template(DATED),
    "preamble": Template(PREAMBLE),
    "end_only": Template(END_ONLY),
    "end_after": Template(END_AFTER),
    "other_end": Template(OTHER_END),
    "parts": Template(PARTS, has_tools=True, has_parts=True),
    "calls": Template(CALLS, has_tools=True),
    "last_tools": Template(LAST_TOOLS, has_tools=True),
    "in_loop": Template(IN_LOOP),
    "words_only": Template(WORDS_ONLY),
    "half": Template(HALF, has_tools=True, has_thoughts=True, is_marked=True),
}
_BODY = re.compile(r"\{%- generation -%\}(.*?)\{%- endgeneration -%\}", re.DOTALL)
_UNLEARNED = "message.weight is defined and not message.weight or message.train is defined and not message.train"


def unmarked(source: str) -> str:
    """Returns a template without its marks. It renders the same text."""
    return _BODY.sub(r"\1", source)


def weighed(source: str) -> str:
    """Returns a template whose marks are around those messages alone that are learned: no weight of 0, and no `train` of false."""
    marked = r"{%- generation -%}\1{%- endgeneration -%}"
    return _BODY.sub(rf"{{%- if {_UNLEARNED} -%}}\1{{%- else -%}}{marked}{{%- endif -%}}", source)


def _today(folder: pathlib.Path, kind: str, template: str) -> dict[str, Any]:
    """Writes a folder as transformers 5 does."""
    (folder / "tokenizer.json").write_text(file_of(kind))
    (folder / "chat_template.jinja").write_text(template)
    return {"backend": "tokenizers", "tokenizer_class": "TokenizersBackend", **names_of(kind)}


def _earlier(folder: pathlib.Path, kind: str, template: str) -> dict[str, Any]:
    """Writes a folder as transformers 4 did."""
    (folder / "tokenizer.json").write_text(file_of(kind))
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    mapped = {key: {"content": name, **flags} for key, name in names_of(kind).items()}
    (folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    listed = json.loads(file_of(kind))["added_tokens"]
    decoder = {str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in listed}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": decoder,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": template,
        "add_bos_token": False,
        **names_of(kind),
    }


def _named(folder: pathlib.Path, kind: str, template: str) -> dict[str, Any]:
    """Writes a folder with two templates, of which one is for tools."""
    both = [
        {"name": "default", "template": template},
        {"name": "tool_use", "template": "{{- '<|im_start|>' -}}" + template},
    ]
    return {**_earlier(folder, kind, template), "chat_template": both}


def _map_alone(folder: pathlib.Path, kind: str, template: str) -> dict[str, Any]:
    """Writes a folder whose special tokens are in a file of their own."""
    found = _earlier(folder, kind, template)
    return {key: found[key] for key in ("tokenizer_class", "chat_template")}


def _lacking(folder: pathlib.Path, kind: str, template: str) -> dict[str, Any]:
    """Writes a folder whose tokenizer.json lacks the added tokens: they are beside it."""
    found = _earlier(folder, kind, template)
    (folder / "tokenizer.json").write_text(file_of(kind, added=False))
    return {**found, "image_token": "<image>"}


# {form: what writes a folder's files, and returns its tokenizer_config.json}
FORMS = {"today": _today, "earlier": _earlier, "named": _named, "map_alone": _map_alone, "lacking": _lacking}


def write(folder: pathlib.Path, kind: str, template: str, form: str = "today") -> pathlib.Path:
    """Writes a tokenizer's folder, and returns it."""
    folder.mkdir(parents=True)
    config = FORMS[form](folder, kind, template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


PIECES = [
    *(
        "the weather",
        " good",
        "word",
        " is ",
        "Paris",
        "a",
        "12",
        "é",
        "中文",
        "🙂",
        "ﬁ",
        "e\u0301",
        "\u00a0",
        "\u200b",
        "{}",
        '"',
        "\\",
    ),
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", " \n", SPACE),
    *(
        "</s>",
        "<s>",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|user|>",
        "<both>",
        "<mask>",
        "<pad>",
        "[SEP]",
        "[INST]",
    ),
    *(
        "<think>",
        "</think>",
        "<think>\nhm\n</think>\n\n",
        "<tool_call>",
        "### assistant\n",
        "ASSISTANT:",
        "{{ x }}",
        "{% y %}",
    ),
]
PLAIN = [piece for piece in PIECES if not {*piece} & {*"<["}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather <in> a city, é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "default": None}}},
    },
}


def texts(pieces: Sequence[str] = PIECES) -> st.SearchStrategy[str]:
    """Returns texts of words, spaces and letters of many scripts, and of the names of special tokens unless they are left out."""
    piece = st.sampled_from(pieces)
    letters = st.text(st.characters(exclude_characters="<[", exclude_categories=["Cs"]), max_size=3)
    return st.lists(st.one_of(piece, piece, letters), max_size=5).map("".join)


@st.composite
def _message(draw: st.DrawFn, role: str, has_parts: bool) -> dict[str, Any]:
    found = {"role": role, "content": draw(texts())}
    if has_parts and draw(st.booleans()):
        found["content"] = [{"type": "text", "text": text} for text in draw(st.lists(texts(), min_size=1, max_size=2))]
    return found


@st.composite
def _answer(draw: st.DrawFn, template: Template) -> list[dict[str, Any]]:
    """Returns an answer of the assistant, maybe after calls of tools."""
    found = []
    if template.has_tools and draw(st.integers(0, 2)) == 1:
        given = st.one_of(
            st.just('{"city": "Paris"}'), st.dictionaries(st.sampled_from(["city", "é"]), texts(), max_size=2)
        )
        calls = [
            {"id": f"c{number}", "type": "function", "function": {"name": "weather", "arguments": draw(given)}}
            for number in range(draw(st.sampled_from([1, 1, 2])))
        ]
        content = draw(st.sampled_from([{}, {"content": None}, {"content": ""}, {"content": "Let me see."}]))
        found.append({"role": "assistant", **content, "tool_calls": calls})
        found += [{**draw(_message("tool", template.has_parts)), "tool_call_id": call["id"]} for call in calls]
    last = draw(_message("assistant", template.has_parts))
    if template.has_thoughts and draw(st.booleans()):
        last |= {draw(st.sampled_from(["reasoning_content", "reasoning", "thinking"])): draw(texts())}
    if draw(st.integers(0, 9)) == 7:
        last |= {"tool_calls": None, "reasoning_content": None, "name": None}
    last |= draw(st.sampled_from([{}] * 6 + [{"weight": 0}, {"weight": 1}, {"train": False}, {"train": True}]))
    return [*found, last]


@st.composite
def conversations(draw: st.DrawFn, template: Template) -> dict[str, Any]:
    """Draws an example with a conversation, most of them such as the template takes: {"messages": [...], "tools": [...]}."""
    parts = template.has_parts
    if draw(st.integers(0, 19)) == 13:  # any messages in any order
        role = st.sampled_from(["system", "user", "assistant", "tool", "other"])
        messages = draw(st.lists(role.flatmap(lambda role: _message(role, parts)), min_size=1, max_size=4))
    else:
        messages = [draw(_message("system", parts))] if template.has_system and draw(st.booleans()) else []
        for _ in range(draw(st.integers(1, 3))):
            messages += [draw(_message("user", parts)), *draw(_answer(template))]
        if draw(st.integers(0, 4)) == 3:
            messages.append(draw(_message("user", parts)))
    if template.has_tools and draw(st.booleans()):
        return {"messages": messages, "tools": draw(st.sampled_from([[TOOL], [TOOL, TOOL], []]))}
    return {"messages": messages}
