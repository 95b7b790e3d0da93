import pathlib
import subprocess
import sys
import sysconfig

import pytest

from zerojax.data import python_stdlib, source
from zerojax.errors import UserError


def read(data_dir, split) -> dict[str, str]:
    """Reads a split as {path: text}."""
    opened = source.open_source("python_stdlib", split, data_dir)
    examples = [opened[i] for i in range(len(opened))]
    return {example["path"].decode(): example["text"].decode() for example in examples}


def test_splits_hold_every_file_once_with_its_text(stdlib_dir):
    train, validation = read(stdlib_dir, "train"), read(stdlib_dir, "validation")
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    assert not train.keys() & validation.keys()
    assert sorted(train | validation) == python_stdlib.list_files(root)
    for path, text in (train | validation).items():
        assert text == (root / path).read_text(encoding="utf-8", errors="replace"), path


def test_about_one_file_in_twenty_is_held_out(stdlib_dir):
    train, validation = read(stdlib_dir, "train"), read(stdlib_dir, "validation")
    assert all(map(python_stdlib.is_held_out, validation)) and not any(map(python_stdlib.is_held_out, train))
    assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.1


def test_the_order_is_the_same_in_another_build(stdlib_dir, tmp_path):
    source.prepare("python_stdlib", tmp_path)
    assert list(read(tmp_path, "train")) == list(read(stdlib_dir, "train"))


def test_tests_and_installed_packages_are_omitted(tmp_path):
    kept = ["json/decoder.py", "os.py", "unittest/case.py"]
    skipped = ["test/a.py", "lib2to3/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d/e.py"]
    skipped += ["dist-packages/f.py", "__pycache__/g.py", "h.txt"]
    for name in kept + skipped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert python_stdlib.list_files(tmp_path) == kept


def test_a_python_without_source_is_an_error_of_one_line(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"this Python, and .* has none; install") as caught:
        source.prepare("python_stdlib", tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_building_and_reading_is_quiet_and_never_imports_tensorflow(tmp_path):
    code = (
        "import sys; from zerojax.data import batches, source, tokenizer;"
        f"source.prepare('python_stdlib', {str(tmp_path)!r});"
        f"opened = source.open_source('python_stdlib', 'train', {str(tmp_path)!r});"
        "made = batches.make_batches(opened, tokenizer.load_tokenizer('bytes'), text_key='text', rows=[0, 1],"
        " num_rows=2, seq_len=16, seed=0);"
        "assert next(made)['tokens'].shape == (2, 17); made.close();"
        "assert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
