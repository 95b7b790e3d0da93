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
from zerojax.data import batches
from zerojax.data import source as source_lib
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import tasks
from zerojax.errors import UserError
from zerojax.trainer import command, settings
from zerojax.trainer import config as config_lib
from zerojax.trainer import model as model_lib
from zerojax.trainer.checks import names
from zerojax.trainer.tuning import examples

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
    with names.of_config(), tempfile.TemporaryDirectory() as folder:
        _show(config, pathlib.Path(config.data.dir or folder), given.show, is_json=given.json)


def _show(config: settings.Config, data_dir: pathlib.Path, count: int, *, is_json: bool) -> None:
    places = config_lib.places(config.data, data_dir)
    if places.is_random:
        raise UserError(f"config.data.name: is {config.data.name!r}, whose tokens are no text; name a dataset or files")
    if not places.train_file:
        source_lib.prepare(places.name, data_dir)
    tokenizer = tokenizer_lib.load_tokenizer(config.data.tokenizer)
    console = Console(highlight=False, soft_wrap=True)
    mark = "" if console.is_terminal else "*"
    for number, (shown, rows) in enumerate(_examples(config, places, tokenizer, count), 1):
        if is_json:
            print(json.dumps(as_json(shown, rows), ensure_ascii=False), flush=True)
            continue
        console.print(Text(f"example {number}", style="bold"))
        for row in rows:
            console.print(coloured(row, tokenizer, mark))
            console.print(Text(f"  ids: {' '.join(map(str, row.ids[:MOST_TOKENS].tolist()))}", style=_READ))
        for line in [*origins(rows, tokenizer, config.data.task), *map(names.in_config, shown.notes)]:
            console.print(Text(f"  {line}"))
    if not is_json:
        console.print(
            Text.assemble("learned tokens are ", ("like this", _LEARNED), ", and others ", ("like this", _READ))
        )


def _examples(
    config: settings.Config, places: batches.Places, tokenizer: tokenizer_lib.Tokenizer, count: int
) -> Iterator[tuple[tasks.Shown, list[ShownTokens]]]:
    """Yields the first training examples, each with its arrays."""
    data = config.data
    source: Any = places.open(True, data.text_key if data.task == tasks.TEXT else "")
    first = _First(source, count)
    if data.task == tasks.TEXT:
        frame = tokenizer.document
        for index in range(len(first)):
            ids = [*frame.before, *tokenizer.encode(first[index][data.text_key]).tolist(), *frame.after]
            text = first[index][data.text_key]
            text = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
            example = tasks.Example(np.array(ids, np.int32), np.zeros(0, np.int32), np.ones(len(ids), bool), 0, "")
            row = ShownTokens("a document in a stream of documents", example.inputs, example.labeled)
            yield tasks.Shown(example, text, [tokenizer_lib.told(tokenizer)]), [row]
        return
    family, opened = model_lib.family_of(config)
    form = examples.form(config, family, opened, tokenizer)
    found = tasks.show(
        first,
        tokenizer,
        examples.task(config, family, opened),
        form,
        name=places.of(True)[0],
        folder=examples.folder_of(config, tokenizer),
        names={} if places.train_file else source_lib.class_names(places.name, places.data_dir),
    )
    for shown in found:
        one, nothing = shown.example, np.zeros(len(shown.example.inputs), bool)
        if form.classes:
            yield shown, [ShownTokens(f"learns the class {form.classes[one.targets[0]]!r}", one.inputs, nothing)]
        elif form.is_encoder_decoder:
            yield (
                shown,
                [
                    ShownTokens("the encoder reads", one.inputs, nothing),
                    ShownTokens("the decoder", one.targets, one.labeled),
                ],
            )
        else:
            yield shown, [ShownTokens("", one.inputs, one.labeled)]


class _First:
    """The first examples of a source."""

    def __init__(self, source: source_lib.Source, count: int):
        self._source, self._count = source, count

    def __len__(self) -> int:
        return min(self._count, len(self._source))

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._source[index]

    def place(self, index: int) -> str:
        return source_lib.place_of(self._source, index, "example")


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
