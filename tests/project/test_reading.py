"""Counts what a reader follows through one train step: files that it enters while it is traced, and calls within each other."""

import pathlib
import sys

import jax

import zerojax
from configs import zero3
from zerojax.trainer import config as config_lib
from zerojax.trainer import program

PACKAGE = f"{pathlib.Path(zerojax.__file__).parent}/"
FILES, FILES_OF_ZERO, FRAMES = 30, 15, 27  # at most


def test_a_step_of_zero3_enters_few_files_and_few_calls_within_each_other():
    built = program.build(config_lib.from_dict(zero3.get_config()), devices=jax.devices()[:2])
    files, depths = set(), set()

    def entered(frame, *_):
        if frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename)
            depth = 0
            while frame:
                depth, frame = depth + frame.f_code.co_filename.startswith(PACKAGE), frame.f_back
            depths.add(depth)

    before = sys.gettrace()
    sys.settrace(entered)  # of calls alone, since it returns no function for their lines
    try:
        built.train_step.trace(built.partition.abstract_state, built.abstract_batch)
    finally:
        sys.settrace(before)
    of_zero = [path for path in files if path.startswith(f"{PACKAGE}zero/")]
    lines = sum(len(pathlib.Path(path).read_text().splitlines()) for path in of_zero)
    print(f"{len(files)} files; of zero/ {len(of_zero)}, with {lines:,} lines; {max(depths)} frames")
    assert len(files) <= FILES and len(of_zero) <= FILES_OF_ZERO and max(depths) <= FRAMES
