"""Shows the tokens of a run's examples, and what is learned of them. This module is the command line `zerojax data`.

zerojax data --config mine.py --show 3          tokens, of which those that are learned stand out, ids, and where special tokens come from
zerojax data --config mine.py --show 3 --json   a line of JSON for each example: ids, learned (0 or 1 for each), text
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from zerojax.commands import arguments
from zerojax.data import batches, blocks, mixture
from zerojax.data import source as source_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import tasks
from zerojax.errors import UserError
from zerojax.trainer import command, examples, setting_names, settings
from zerojax.trainer import config as config_lib
from zerojax.trainer import model as model_lib

_LEARNED, _READ = "bold green", "dim"
MOST_TOKENS = 400  # of an array that are shown; JSON has all


@dataclasses.dataclass(frozen=True)
class ShownTokens:
    """An array of an example's tokens.

    Attributes:
      title: what reads or learns it.
      ids: int32[length].
      learned: bool[length].
    """

    title: str
    ids: np.ndarray
    learned: np.ndarray


@arguments.command
def main() -> None:
    """Prints the examples. A UserError prints one line and ends with status 2."""
    parser = arguments.OneLineParser("zerojax data", doc=__doc__)
    parser.add_argument("--show", type=int, default=3, help="examples to show, the first of the training data (3)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each example instead")
    parser.add_argument("--config", metavar="FILE", help="a config; its settings follow as --config.NAME=VALUE")
    given, rest = parser.parse_known_args(sys.argv[1:])
    if given.show < 1:
        raise UserError(f"--show: must be 1 or more, and is {given.show}")
    sys.argv[1:] = [*([f"--config={given.config}"] if given.config else []), *rest]
    config = config_lib.from_dict(command.parse(sys.argv))
    with setting_names.of_config(), tempfile.TemporaryDirectory() as folder:
        _show(config, pathlib.Path(config.data.dir or folder), given.show, is_json=given.json)


def _show(config: settings.Config, data_dir: pathlib.Path, count: int, *, is_json: bool) -> None:
    mixed = config_lib.sources(config.data)
    groups = {source.title: source.data for source in mixed} if mixed else {"": config.data}
    tokenizer = tokenizer_lib.load_tokenizer(config.data.tokenizer)
    console = Console(highlight=False, soft_wrap=True)
    mark = "" if console.is_terminal else "*"
    for title, group in groups.items():
        own = dataclasses.replace(config, data=group)
        for number, (shown, rows) in enumerate(_examples(own, data_dir, tokenizer, count), 1):
            if is_json:
                named = {"source": title} if mixed else {}
                print(json.dumps({**as_json(shown, rows), **named}, ensure_ascii=False), flush=True)
                continue
            console.print(Text(f"example {number}" + (f" of {title}" if mixed else ""), style="bold"))
            for row in rows:
                console.print(coloured(row, tokenizer, mark))
                console.print(Text(f"  ids: {' '.join(map(str, row.ids[:MOST_TOKENS].tolist()))}", style=_READ))
            for line in [*origins(rows, tokenizer, group.task), *map(setting_names.in_config, shown.notes)]:
                console.print(Text(f"  {line}"))
    if not is_json:
        told = ("learned tokens are ", (f"{mark}like this", _LEARNED), ", and others ", ("like this", _READ))
        console.print(Text.assemble(*told))


def _examples(
    config: settings.Config, data_dir: pathlib.Path, tokenizer: tokenizer_lib.Tokenizer, count: int
) -> Iterator[tuple[tasks.Shown, list[ShownTokens]]]:
    """Yields the first training examples, each with its arrays."""
    data, places = config.data, config.data.places(data_dir)
    if places.is_random:
        raise UserError(f"config.data.name: is {data.name!r}, whose tokens are no text; name a dataset or files")
    if not places.train_file:
        source_lib.prepare(places.name, data_dir)
    source = mixture.MixedSource("", places)
    first = _First(source.open(True, 1, None), count)
    if data.task == tasks.TEXT:
        for index in range(len(first)):
            text = first[index].get(data.text_key)
            if not isinstance(text, str | bytes):
                raise UserError(f"{first.place(index)}: has no text in field {data.text_key!r}, which `text_key` names")
            ids = batches.document_ids(tokenizer, text)
            text = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
            example = tasks.Example(ids, np.zeros(0, np.int32), np.ones(len(ids), bool), 0, "")
            row = ShownTokens("a document in a stream of documents", example.inputs, example.labeled)
            yield tasks.Shown(example, text, [tokenizer_lib.told(tokenizer)]), [row]
        return
    family, opened = model_lib.family_of(config)
    form = examples.form(config, family, opened, tokenizer)
    found = tasks.show(
        first,
        tokenizer,
        examples.task_settings(config, family, opened),
        form,
        name=places.of(True)[0],
        folder=examples.folder_of(config, tokenizer),
        names=source.names(),
    )
    for shown in found:
        one, nothing = shown.example, np.zeros(len(shown.example.inputs), bool)
        if form.classes:
            title = f"learns the class {form.classes[one.targets[0]]!r}"
            yield shown, [ShownTokens(title, one.inputs, nothing)]
        elif form.is_encoder_decoder:
            targets = ShownTokens("the decoder", one.targets, one.labeled)
            yield shown, [ShownTokens("the encoder reads", one.inputs, nothing), targets]
        else:
            yield shown, [ShownTokens("", one.inputs, one.labeled)]


class _First:
    """The first documents of a source."""

    def __init__(self, opened: blocks.DocumentBlocks, count: int):
        self._found: list[tuple[source_lib.Source, int]] = []
        for number in range(len(opened)):
            block = opened[number]
            self._found += [(block, index) for index in range(min(len(block), count - len(self._found)))]
            if len(self._found) == count:
                break

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        block, inner = self._found[index]
        return block[inner]

    def place(self, index: int) -> str:
        return source_lib.place_of(*self._found[index], "example")


def as_json(shown: tasks.Shown, rows: list[ShownTokens]) -> dict[str, Any]:
    """Returns an example as JSON values. Of an encoder-decoder `targets` and `targets_learned` are the decoder's."""
    found: dict[str, Any] = {}
    for row, prefix in zip(rows, ("", "targets_")):
        found["targets" if prefix else "ids"] = row.ids.tolist()
        found[f"{prefix}learned"] = row.learned.astype(int).tolist()
    return {**found, "text": shown.text}


def coloured(row: ShownTokens, tokenizer: tokenizer_lib.Tokenizer, mark: str = "") -> Text:
    """Returns the first tokens of an array with bars between them. Learned ones stand out, and `mark` is before each."""
    found = Text(f"  {row.title}: " if row.title else "  ")
    for token, is_learned in zip(row.ids[:MOST_TOKENS].tolist(), row.learned):
        letters = "".join(one if one.isprintable() else repr(one)[1:-1] for one in tokenizer.name_of(token))
        found.append(mark + letters if is_learned else letters, style=_LEARNED if is_learned else _READ)
        found.append("|", style=_READ)
    if len(row.ids) > MOST_TOKENS:
        found.append(f" and {len(row.ids) - MOST_TOKENS} tokens more")
    return found


def origins(rows: list[ShownTokens], tokenizer: tokenizer_lib.Tokenizer, task: str) -> Iterator[str]:
    """Yields where each special token of an example comes from."""
    seen = dict.fromkeys(token for row in rows for token in row.ids.tolist() if token in tokenizer.special_ids)
    for token in seen:
        why = tokenizer.why(token)
        if task == tasks.CHAT:
            why = f"the chat template's text ({why})"
        yield f"{tokenizer.name_of(token)!r} ({token}): {why}"


if __name__ == "__main__":
    main()
