import errno
import json
import os
import shutil
import signal

import numpy as np
import pytest
import tensorflow_datasets as tfds

from zerojax.data import python_stdlib, source
from zerojax.errors import UserError

# Each kills its own process while python_stdlib is being prepared.
KILLED = "import os, signal, tensorflow_datasets as tfds; from zerojax.data import python_stdlib, source\n"
WHILE_GENERATING = """
def die(self, root, paths):
    yield paths[0], {"text": "half", "path": paths[0]}
    os.kill(os.getpid(), signal.SIGKILL)
python_stdlib.PythonStdlib._generate_examples = die
"""
BEFORE_THE_RENAME = """
def die(self, path, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
tfds.core.DatasetInfo.write_to_directory = die
"""


def refusal(function, *args) -> str:
    """Returns the one-line error of function(*args)."""
    with pytest.raises(UserError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def broken_dir(stdlib_dir, tmp_path):
    """Copies the prepared dataset, to be damaged."""
    shutil.copytree(stdlib_dir, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_source_gives_examples_by_index(stdlib_dir):
    opened = source.open_source("python_stdlib", "train", stdlib_dir)
    assert set(opened[0]) == {"text", "path"} and isinstance(opened[0]["text"], bytes)
    assert opened[len(opened) - 1]["path"] != opened[0]["path"]


def test_parts_of_splits_can_be_opened(stdlib_dir):
    sizes = {
        split: len(source.open_source("python_stdlib", split, stdlib_dir))
        for split in ("train", "validation", "train+validation", "train[:3]", "train[3:]")
    }
    assert sizes["train[:3]"] == 3 and sizes["train[3:]"] == sizes["train"] - 3
    assert sizes["train+validation"] == sizes["train"] + sizes["validation"]


def test_preparing_again_leaves_the_files_alone(stdlib_dir):
    files = {path: path.stat().st_mtime_ns for path in stdlib_dir.rglob("*") if path.is_file()}
    source.prepare("python_stdlib", stdlib_dir)
    assert files == {path: path.stat().st_mtime_ns for path in stdlib_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("where", [WHILE_GENERATING, BEFORE_THE_RENAME])
def test_a_run_after_one_killed_in_preparation_works(commands, tmp_path, stdlib_dir, where):
    done = commands.python(KILLED + where + f"source.prepare('python_stdlib', {str(tmp_path)!r})")
    assert done.status == -signal.SIGKILL, done.err
    assert "has no prepared" in refusal(source.open_source, "python_stdlib", "train", tmp_path)
    source.prepare("python_stdlib", tmp_path)
    first = source.open_source("python_stdlib", "train", stdlib_dir)
    again = source.open_source("python_stdlib", "train", tmp_path)
    assert [again[i] for i in range(len(again))] == [first[i] for i in range(len(first))]


def test_two_runs_that_prepare_at_once_both_work(tmp_path, monkeypatch):
    generate = python_stdlib.PythonStdlib._generate_examples

    def generate_late(self, root, paths):
        monkeypatch.undo()
        source.prepare("python_stdlib", tmp_path)  # the other run, which is faster
        yield from generate(self, root, paths[:1])

    monkeypatch.setattr(python_stdlib.PythonStdlib, "_generate_examples", generate_late)
    source.prepare("python_stdlib", tmp_path)
    assert len(source.open_source("python_stdlib", "train", tmp_path)) > 1


def test_any_registered_dataset_is_prepared_the_same_way(tmp_path):
    class Squares(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("2.0.0")

        def _info(self):
            features = {"n": tfds.features.Scalar(np.int64)}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"test": ((n, {"n": n * n}) for n in range(5))}

        def _generate_examples(self):
            raise NotImplementedError

    source.prepare("squares", tmp_path)
    opened = source.open_source("squares", "test", tmp_path)
    assert sorted(opened[i]["n"] for i in range(len(opened))) == [0, 1, 4, 9, 16]


def test_an_unknown_name_shows_the_nearest(tmp_path):
    line = refusal(source.prepare, "python_stdlb", tmp_path)
    assert line.startswith("name: no dataset 'python_stdlb'; nearest datasets: python_stdlib, ")
    assert refusal(source.open_source, "lm1bb", "train", tmp_path).count("lm1b") == 2


@pytest.mark.parametrize("name", ["", "a b", "lm1b/no_such_config", "lm1b:0.0.1"])
def test_a_malformed_name_is_an_error(tmp_path, name):
    assert f"name: {name!r} cannot be opened" in refusal(source.prepare, name, tmp_path)


@pytest.mark.parametrize("split", ["tran", "", "train[", "test", "train[:1x]"])
def test_an_unknown_split_shows_the_known(stdlib_dir, split):
    line = refusal(source.open_source, "python_stdlib", split, stdlib_dir)
    assert f"no split {split!r} in 'python_stdlib'; known splits: " in line
    assert "train" in line and "validation" in line


def test_an_empty_split_is_an_error(stdlib_dir):
    assert "'train[:0]' of 'python_stdlib' is empty" in refusal(
        source.open_source, "python_stdlib", "train[:0]", stdlib_dir
    )


def test_an_unprepared_dataset_is_an_error(tmp_path):
    line = refusal(source.open_source, "python_stdlib", "train", tmp_path)
    assert f"data_dir: {str(tmp_path)!r} has no prepared 'python_stdlib'" in line


def test_a_dataset_without_its_data_files_is_an_error(broken_dir):
    for path in broken_dir.rglob("*-train.*"):
        path.unlink()
    assert "delete the dataset and run again" in refusal(source.open_source, "python_stdlib", "train", broken_dir)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
@pytest.mark.parametrize("target", ["/dev/zero", "gone"])
def test_a_device_or_a_broken_link_in_place_of_a_description_is_an_error_at_once(name, target, broken_dir):
    (path,) = broken_dir.rglob(name)
    path.unlink()
    path.symlink_to(target)
    for call in (source.open_source, source.class_names):
        given = ("python_stdlib", "train", broken_dir) if call is source.open_source else ("python_stdlib", broken_dir)
        assert f"{str(path)!r} is not a file that can be read; delete the dataset" in refusal(call, *given)


def test_a_dataset_without_its_description_is_an_error(broken_dir):
    (info,) = broken_dir.rglob("dataset_info.json")
    info.unlink()
    assert "lists no splits; delete it" in refusal(source.open_source, "python_stdlib", "train", broken_dir)
    info.write_text("{")
    assert "cannot be opened" in refusal(source.open_source, "python_stdlib", "train", broken_dir)


def test_a_dataset_prepared_in_another_format_is_an_error(broken_dir):
    (info,) = broken_dir.rglob("dataset_info.json")
    info.write_text(json.dumps(json.loads(info.read_text()) | {"fileFormat": "tfrecord"}))
    assert "TFRECORD" in refusal(source.open_source, "python_stdlib", "train", broken_dir)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError("Not enough disk space. Needed: 4 GiB"),
        RuntimeError("write() failed: No space left on device; writing x"),
    ],
)
def test_a_full_disk_names_the_directory(tmp_path, monkeypatch, error):
    def fail(self, root, paths):
        raise error
        yield

    monkeypatch.setattr(python_stdlib.PythonStdlib, "_generate_examples", fail)
    line = refusal(source.prepare, "python_stdlib", tmp_path)
    assert f"data_dir: no space left in {str(tmp_path)!r}" in line


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    assert "data_dir: cannot write" in refusal(source.prepare, "python_stdlib", tmp_path / "file")


def test_a_failed_download_offers_the_dataset_that_needs_no_network(tmp_path, monkeypatch):
    def fail(self, dl_manager):
        raise ConnectionError("Failed to resolve 'example.org'\nand much more")

    monkeypatch.setattr(python_stdlib.PythonStdlib, "_split_generators", fail)
    line = refusal(source.prepare, "python_stdlib", tmp_path)
    assert "ConnectionError: Failed to resolve 'example.org'" in line and "or use 'python_stdlib'" in line


SPLITS = {  # (training, held out) -> the number of examples in both; -1: it depends on the Python
    ("train", "validation"): 0,
    ("train[:90%]", "train[90%:]"): 0,
    ("train", "train"): -1,
    ("train[:10]", "train[5:8]"): 3,
    ("train[3:5]+validation", "train[:4]+validation[:2]"): 3,
}


@pytest.mark.parametrize("splits", SPLITS)
def test_a_held_out_split_has_no_example_that_is_trained_on(stdlib_dir, splits):
    shared = SPLITS[splits]
    if not shared:
        source.check_held_out("python_stdlib", *splits, stdlib_dir)
        return
    line = refusal(source.check_held_out, "python_stdlib", *splits, stdlib_dir)
    assert line.startswith("eval_split: ") and f"`train_split={splits[0]!r}`" in line
    count = int(line.split()[1])
    assert count == (shared if shared > 0 else len(source.open_source("python_stdlib", splits[1], stdlib_dir)))


def test_splits_of_a_negative_size_are_empty(stdlib_dir):
    line = refusal(source.open_source, "python_stdlib", "train[5:2]", stdlib_dir, "eval_split")
    assert line.startswith("eval_split: split 'train[5:2]' of 'python_stdlib' is empty")


def test_swapped_files_of_splits_are_told(broken_dir):
    first, second = sorted(broken_dir.rglob("*array_record*"))
    first.rename(first.with_name("x"))
    second.rename(first)
    first.with_name("x").rename(second)
    for split in ("train", "validation", "train[:1]"):
        line = refusal(source.open_source, "python_stdlib", split, broken_dir)
        assert "dataset_info.json beside it lists" in line and "files were swapped or damaged; delete" in line
    info = next(broken_dir.rglob("dataset_info.json"))
    listed = json.loads(info.read_text())
    for split, other in zip(listed["splits"], [split["shardLengths"] for split in reversed(listed["splits"])]):
        split["shardLengths"] = other
    info.write_text(json.dumps(listed))  # the counts are right again, as of splits of one size
    for split in ("train", "validation", "train[:1]"):
        line = refusal(source.open_source, "python_stdlib", split, broken_dir)
        assert "holds what 'python_stdlib-" in line and "files were swapped or damaged; delete" in line


def test_an_example_damaged_beyond_the_first_is_named_when_it_is_read(broken_dir):
    path = next(broken_dir.rglob("*-train.*"))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(50_000))
    opened = source.open_source("python_stdlib", "train", broken_dir)
    ends = [refusal(opened.__getitem__, at) for at in range(len(opened)) if not is_readable(opened, at)]
    assert 0 < len(ends) < len(opened)
    assert all(end.startswith("data_dir: ") and ", example " in end and "delete the dataset" in end for end in ends)


def is_readable(opened, at: int) -> bool:
    try:
        opened[at]
    except UserError:
        return False
    return True
