"""Merges an adapter into its model. This module is the command line `zerojax merge`.

zerojax merge FOLDER --adapter FOLDER --out FOLDER    writes a folder of transformers, one tensor at a time
"""

import argparse
import pathlib
import sys

from zerojax import display, files
from zerojax.checkpoint import lock
from zerojax.commands import arguments
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import huggingface, merged, peft


@arguments.command
def main() -> None:
    """Writes the merged model. A UserError prints one line and ends with status 2."""
    given = _parse(sys.argv[1:])
    files.check_path(given.out, "--out")
    out = pathlib.Path(given.out)
    if out.resolve() in (pathlib.Path(given.folder).resolve(), pathlib.Path(given.adapter).resolve()):
        raise UserError(f"--out {given.out}: is a folder that is read; name another")
    folder = folder_lib.open_folder(given.folder)
    adapter = peft.open_adapter(given.adapter, folder.family, folder.model)
    target = out.resolve()
    with files.writing(target.parent, "choose another directory"):
        target.parent.mkdir(parents=True, exist_ok=True)
    held = lock.take(target.with_name(f".{target.name}.lock"), str(target), "choose another directory")
    print(f"{out}: writing the merged model", flush=True)
    try:
        merged.export(folder, adapter, out, dtype=huggingface.DTYPES.get(given.dtype))
    finally:
        held.release()
    count = len(adapter.chosen.adapted)
    size = display.human(files.folder_bytes(out))
    print(f"{out}: written, {size}, with {count} adapters of {given.adapter} merged into the model of {given.folder}")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser("zerojax merge", doc=__doc__)
    add = parser.add_argument
    add("folder", help="a folder with config.json and safetensors")
    add("--adapter", required=True, help="a folder with adapter_config.json and adapter_model.safetensors")
    add("--out", required=True, help="the folder to write: new, empty, or with an earlier export")
    add(
        "--dtype",
        default="auto",
        choices=("auto", *huggingface.DTYPES),
        help="of the tensors; auto: as they are stored",
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
