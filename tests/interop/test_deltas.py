"""Checks that readers elsewhere have the newest weights. This module tests zerojax.interop.deltas and scripts/read_deltas.py."""

import dataclasses
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import runs
import safetensors.numpy

from zerojax.errors import UserError
from zerojax.interop import deltas
from zerojax.models import families
from zerojax.models import family as family_lib

# Not by importorskip: each process of the tests would import torch, for seconds.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="scripts/read_deltas.py reads into torch"
)

FAMILY = families.PRESETS["test"]


@pytest.fixture(scope="module")
def reader():
    path = pathlib.Path(__file__).parents[2] / "scripts" / "read_deltas.py"
    spec = importlib.util.spec_from_file_location("read_deltas", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    return dataclasses.replace(FAMILY.presets["test"], vocab_size=64, num_layers=1)


def drawn(model, seed):
    random = np.random.default_rng(seed)

    def draw(node):
        if isinstance(node, dict):
            return {name: draw(child) for name, child in node.items()}
        return random.normal(size=node.shape).astype(np.float32)

    return draw(family_lib.abstract_params(FAMILY.parts, model))


def published(params, model, folder, step, **how):
    return deltas.publish(params, FAMILY, model, folder, step, dtype=np.float32, **how)


def test_a_reader_gets_all_tensors_and_then_those_that_changed(reader, model, tmp_path):
    params = drawn(model, 0)
    first = published(params, model, tmp_path, 1, file_bytes=40_000)
    assert first.tensors == first.of > 5 and len(list((tmp_path / "1").iterdir())) > 1
    every = dict(reader.tensors(str(tmp_path), reader.index(str(tmp_path))))
    assert len(every) == first.of and sum(tensor.numel() * 4 for tensor in every.values()) == first.nbytes
    np.testing.assert_array_equal(every["model.embed_tokens.weight"], params["embed"]["embedding"])

    params["norm"]["scale"] = params["norm"]["scale"] + 1
    assert published(params, model, tmp_path, 2) == deltas.Published(1, first.of, params["norm"]["scale"].nbytes)
    found = reader.index(str(tmp_path))
    assert found["step"] == 2 and dict(reader.tensors(str(tmp_path), found, 1)).keys() == {"model.norm.weight"}
    assert len(dict(reader.tensors(str(tmp_path), found))) == first.of
    assert published(params, model, tmp_path, 3).tensors == 0


def test_steps_that_no_index_names_are_removed_and_a_step_before_the_newest_is_written_as_a_whole(
    reader, model, tmp_path
):
    for step in (1, 2, 3):
        published(drawn(model, step), model, tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "index.json"]
    earlier = reader.index(str(tmp_path))
    again = published(drawn(model, 2), model, tmp_path, 2)
    assert len(dict(reader.tensors(str(tmp_path), earlier))) == again.of  # of a reader that has just read the index
    assert again.tensors == again.of
    assert len(dict(reader.tensors(str(tmp_path), reader.index(str(tmp_path))))) == again.of


def test_a_step_that_comes_again_leaves_the_first_whole_until_the_index_names_it(reader, model, tmp_path, monkeypatch):
    for step in (1, 2):
        published(drawn(model, step), model, tmp_path, step)
    before = reader.index(str(tmp_path))

    def end(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(deltas.files, "replace", end)
        published(drawn(model, 9), model, tmp_path, 2)
    assert reader.index(str(tmp_path)) == before
    every = dict(reader.tensors(str(tmp_path), before))
    np.testing.assert_array_equal(every["model.embed_tokens.weight"], drawn(model, 2)["embed"]["embedding"])
    published(drawn(model, 9), model, tmp_path, 2)
    every = dict(reader.tensors(str(tmp_path), reader.index(str(tmp_path))))
    np.testing.assert_array_equal(every["model.embed_tokens.weight"], drawn(model, 9)["embed"]["embedding"])
    published(drawn(model, 3), model, tmp_path, 3)
    published(drawn(model, 4), model, tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "index.json"]


def test_a_folder_without_deltas_is_one_line(reader, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["read_deltas.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        reader.main()
    assert capsys.readouterr().err.startswith(f"{tmp_path}: holds no index.json")


def test_a_list_that_another_program_cuts_ends_in_silence(reader, model, tmp_path):
    published(drawn(model, 0), model, tmp_path, 1)
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, reader.__file__, tmp_path], **pipes) as listing:
        listing.stdout.close()
        assert listing.stderr.read() == b""


def test_damage_is_told(reader, model, tmp_path):
    published(drawn(model, 0), model, tmp_path, 1)
    (file,) = (tmp_path / "1").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not what was written"):
        list(reader.tensors(str(tmp_path), reader.index(str(tmp_path))))
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(UserError, match=r"index.json: is no index of weights"):
        published(drawn(model, 0), model, tmp_path, 2)


@pytest.mark.parametrize("how", ["bit", "cut", "gone", "other", "index"])
def test_a_list_of_a_damaged_folder_is_one_line(how, reader, model, tmp_path, monkeypatch, capsys):
    published(drawn(model, 0), model, tmp_path, 1)
    (file,) = (tmp_path / "1").iterdir()
    content = file.read_bytes()
    if how == "index":
        (tmp_path / "index.json").write_text('{"step": 1, "tensors": {"a": 3}}')
    elif how == "gone":
        file.unlink()
    else:
        bit = content[:-1] + bytes([content[-1] ^ 1])
        other = safetensors.numpy.save({"a": np.zeros(1)})
        file.write_bytes({"bit": bit, "cut": content[:-9], "other": other}[how])
    monkeypatch.setattr("sys.argv", ["read_deltas.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        reader.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}: is damaged, or changed while it was read")


def test_no_bit_of_an_index_changes_in_silence(reader, model, tmp_path):
    published(drawn(model, 0), model, tmp_path, 1)
    path = tmp_path / "index.json"
    content, before, rng, refused = path.read_bytes(), reader.index(str(tmp_path)), np.random.default_rng(0), 0
    for bit in rng.integers(8 * len(content), size=200):
        altered = bytearray(content)
        altered[bit // 8] ^= 1 << bit % 8
        path.write_bytes(altered)
        try:
            assert reader.index(str(tmp_path)).items() >= before.items()
            deltas._read(path)
        except (ValueError, UserError):
            refused += 1
    assert refused > 190
    path.write_text(json.dumps(before))  # of older code
    assert reader.index(str(tmp_path)) == before
    assert published(drawn(model, 0), model, tmp_path, 2).tensors == 0


@pytest.mark.parametrize("damage", [{"step": 1e999}, {"tensors": {"a": {"step": 1, "file": 5, "checksum": []}}}])
def test_an_index_of_other_values_is_told_or_replaced(damage, model, tmp_path):
    published(drawn(model, 0), model, tmp_path, 1)
    (tmp_path / "index.json").write_text(json.dumps({"step": 1, "tensors": {}} | damage))
    try:
        assert published(drawn(model, 0), model, tmp_path, 2).tensors > 5
    except UserError as error:
        assert "index.json: is no index of weights" in str(error)


def test_tensors_whose_file_is_gone_are_written_again(reader, model, tmp_path):
    params = drawn(model, 0)
    published(params, model, tmp_path, 1)
    shutil.rmtree(tmp_path / "1")
    again = published(params, model, tmp_path, 2, may_change=lambda path: False)
    assert again.tensors == again.of == len(dict(reader.tensors(str(tmp_path), reader.index(str(tmp_path)))))


def test_a_worker_follows_a_run_that_goes_back_to_a_checkpoint(reader, model, tmp_path):
    loaded = {}
    worker = reader.Reader()
    worker.model_runner = types.SimpleNamespace(model=types.SimpleNamespace(load_weights=loaded.update))
    published(drawn(model, 0), model, tmp_path, 3)
    worker.read_deltas(str(tmp_path))
    params = drawn(model, 1)
    published(params, model, tmp_path, 2)
    params["norm"]["scale"] = params["norm"]["scale"] + 1
    published(params, model, tmp_path, 3)
    worker.read_deltas(str(tmp_path))
    np.testing.assert_array_equal(loaded["model.embed_tokens.weight"], params["embed"]["embedding"])
    np.testing.assert_array_equal(loaded["model.norm.weight"], params["norm"]["scale"])


def test_a_worker_of_vllm_loads_what_a_run_with_adapters_publishes(reader, cache_dir, tmp_path):
    how = {"devices": 2, "lora__r": 4, "export__deltas_every": 1, "export__format": "huggingface"}
    runs.run(tmp_path, steps=2, export__dtype="fp32", **how)
    loaded = {}
    worker = reader.Reader()
    worker.model_runner = types.SimpleNamespace(model=types.SimpleNamespace(load_weights=loaded.update))
    folder = str(tmp_path / "deltas")
    assert worker.read_deltas(folder) == 2
    found = json.loads((tmp_path / "deltas" / "index.json").read_text())["tensors"]
    changed = {name for name, entry in found.items() if entry["step"] == 2}
    assert changed and all("q_proj" in name or "v_proj" in name for name in changed)
    exported = safetensors.numpy.load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == loaded.keys()
    for name, tensor in exported.items():
        np.testing.assert_array_equal(loaded[name], tensor)
    loaded.clear()
    worker.read_deltas(folder)
    assert not loaded

    runs.run(tmp_path, steps=4, export__dtype="bf16", **how)  # resumed: the frozen tensors get the new dtype too
    assert worker.read_deltas(folder) == 4
    assert loaded.keys() == exported.keys() and {str(tensor.dtype) for tensor in loaded.values()} == {"torch.bfloat16"}
    found = json.loads((tmp_path / "deltas" / "index.json").read_text())["tensors"]
    assert {name for name, entry in found.items() if entry["step"] == 4} == changed
