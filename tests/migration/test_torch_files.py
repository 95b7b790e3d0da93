"""Checks files of torch.save, good and hostile. This module tests zerojax.migration.torch_files."""

import argparse
import collections
import os
import pathlib
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch_writer
from torch_writer import Call

from zerojax.errors import UserError
from zerojax.migration import torch_files

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "deepspeed"


def written(folder, content, **how):
    path = folder / "file.pt"
    torch_writer.save(path, content, **how)
    return path


@pytest.mark.parametrize("compresses", [False, True])
def test_tensors_and_plain_values_come_back(tmp_path, compresses):
    content = {
        "weights": collections.OrderedDict(a=np.arange(6, dtype=np.float32).reshape(2, 3)),
        "half": np.arange(4).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 2), np.float16),
        "number": np.array(7),
        "plain": [1, 2.5, None, True, "text", (3,)],
    }
    found = torch_files.read(written(tmp_path, content, compresses=compresses))
    assert found["plain"] == content["plain"] and found["number"] == 7
    for name in ("half", "empty"):
        assert found[name].dtype == content[name].dtype
        np.testing.assert_array_equal(found[name], content[name])
    np.testing.assert_array_equal(found["weights"]["a"], content["weights"]["a"])


def test_what_pytorch_and_deepspeed_write_is_read():
    found = torch_files.read(GOLDEN / "zero1-fp16-world2/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt")
    state = found["optimizer_state_dict"]
    assert state["zero_stage"] == 1 and state["loss_scaler"].field("cur_scale") == 512.0
    place = state["param_slice_mappings"][0]["lm_head.weight"]
    assert place.field("numel") == 259 * 60
    model = torch_files.read(GOLDEN / "zero1-fp16-world2/global_step4/mp_rank_00_model_states.pt")
    assert model["param_shapes"][0]["lm_head.weight"] == (259, 60)
    assert model["module"]["lm_head.weight"].dtype == np.float16


HOSTILE = (
    "posix.system builtins.eval builtins.getattr subprocess.Popen torch.load torch.hub.load numpy.load builtins.set.add"
)


@pytest.mark.parametrize("name", HOSTILE.split())
def test_any_other_name_is_refused_and_runs_nothing(tmp_path, name):
    trace = tmp_path / "trace"
    content = {"good": np.ones(3, np.float32), "bad": Call(name, f"touch {trace}")}
    found = torch_writer.named(name)  # where torch is imported, its own, which is torch.serialization.load
    written_as = f"{found.__module__}.{found.__qualname__}"
    with pytest.raises(
        UserError, match=rf"file.pt: names {written_as}, which is neither a tensor nor a plain value"
    ) as caught:
        torch_files.read(written(tmp_path, content))
    assert "\n" not in str(caught.value) and not trace.exists()


def test_a_known_function_builds_no_more_than_it_may(tmp_path):
    storage = torch_writer.Storage(np.ones(4, np.float32))
    rebuild = "torch._utils._rebuild_tensor_v2"
    for offset, shape, strides in (
        (0, (5,), (1,)),
        (2, (3,), (1,)),
        (-1, (2,), (1,)),
        (0, (10**9,), (0,)),
        (0, (2,), (-1,)),
    ):
        with pytest.raises(UserError, match="is damaged"):
            torch_files.read(written(tmp_path, Call(rebuild, storage, offset, shape, strides, False, {})))
    for call in (
        Call("torch._tensor._rebuild_from_type_v2", os.path.join, str, ("a", "b"), {}),
        Call("torch.Tensor", 3),
        Call("torch._utils._rebuild_parameter", "text", False, {}),
        Call("deepspeed.utils.tensor_fragment.fragment_address", state=[1]),
    ):
        with pytest.raises(UserError):
            torch_files.read(written(tmp_path, call))


@pytest.mark.parametrize("build", ["torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"])
def test_a_tensor_with_attributes_of_its_own_is_read_without_them(tmp_path, build):
    own = 0, (2, 2), (2, 1), *((False, {}) if build.endswith("_v2") else ())
    kind, arguments = torch_writer.named("torch.Tensor"), (torch_writer.Storage(np.arange(4, dtype=np.float32)), *own)
    content = Call("torch._tensor._rebuild_from_type_v2", torch_writer.named(build), kind, arguments, {"name": "x"})
    found = torch_files.read(written(tmp_path, {"a": content}))
    np.testing.assert_array_equal(found["a"], [[0, 1], [2, 3]])
    other = Call("torch._tensor._rebuild_from_type_v2", collections.OrderedDict, kind, (), {})
    with pytest.raises(UserError, match="is damaged"):
        torch_files.read(written(tmp_path, other))


def test_damaged_and_foreign_files_are_one_line(tmp_path):
    good = written(tmp_path, {"a": np.arange(1000, dtype=np.float32)}).read_bytes()
    path = tmp_path / "other.pt"
    contents = {
        "is not a zip archive": [b"", b"text", pickle.dumps({"a": 1}, protocol=2), good[: len(good) // 2]],
        "cannot be read": [None],
    }
    for message, cases in contents.items():
        for case in cases:
            path.unlink(missing_ok=True)
            if case is not None:
                path.write_bytes(case)
            with pytest.raises(UserError, match=message) as caught:
                torch_files.read(path)
            assert "\n" not in str(caught.value)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/other", "x")
    with pytest.raises(UserError, match=r"holds no data.pkl"):
        torch_files.read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00X\x05")
    with pytest.raises(UserError, match="is damaged"):
        torch_files.read(path)


def test_one_flipped_bit_of_a_tensor_is_found(tmp_path):
    path = written(tmp_path, {"a": np.arange(1000, dtype=np.float32)})
    content = bytearray(path.read_bytes())
    at = content.index(np.float32(500).tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"the checksum of .*data/0 is another"):
        torch_files.read(path)


def test_plain_values_of_python_and_numpy_come_back(tmp_path):
    rng = np.random.RandomState(0).get_state()
    content = {
        "set": {1, 2},
        "raw": b"\x00\xff",
        "loss": np.float32(0.5),
        "step": np.int64(7),
        "rng": rng,
        "big": 2**70,
    }
    content["path"], content["args"] = pathlib.PurePosixPath("a/b"), argparse.Namespace(lr=0.1)
    path = tmp_path / "file.pt"
    raw(path, pickle.dumps(content, protocol=2).replace(b"PurePosixPath", b"PosixPath"))
    found = torch_files.read(path)
    assert {name: found[name] for name in ("set", "raw", "loss", "step", "big", "path")} == {
        **{name: content[name] for name in ("set", "raw", "big")},
        "loss": 0.5,
        "step": 7,
        "path": "a/b",
    }
    assert found["args"].field("lr") == 0.1 and found["rng"][0] == "MT19937" and found["rng"][2:] == rng[2:]


def raw(path, content):
    """Writes a file of torch.save with any bytes as its pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", content)


START, END = b"\x80\x02", b"."
LAUGHS = b"]q\x00" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(60))
ATTACKS = {
    "GLOBAL": b"cposix\nsystem\n(X\x01\x00\x00\x00xtR",
    "STACK_GLOBAL": b"\x8c\x05posix\x8c\x06system\x93",
    "a dotted name": b"\x8c\x0ctorch._utils\x8c\x1e_rebuild_tensor_v2.__globals__\x93",
    "INST": b"(X\x01\x00\x00\x00xiposix\nsystem\n",
    "OBJ": b"(cposix\nsystem\nX\x01\x00\x00\x00xo",
    "a name inside a call": b"ccollections\nOrderedDict\n((cposix\nsystem\n(X\x01\x00\x00\x00xtRttR",
    "a name from the memo": b"X\x05\x00\x00\x00posixq\x00X\x06\x00\x00\x00systemq\x01h\x00h\x01\x93",
    "a state for a function": b"ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__)s\x86b",
    "a state for a class": b"cargparse\nNamespace\nN}X\x0c\x00\x00\x00__setstate__Ns\x86b",
    "a state for a constant": b"ctorch\nTensor\n}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xsb",
    "a state for a text": b"ctorch.torch_version\nTorchVersion\n}X\x01\x00\x00\x00aNsb",
    "a constant is called": b"ctorch\nFloatStorage\n)R",
    "an extension": b"\x82\x01",
    "another persistent id": b"X\x01\x00\x00\x00xQ",
    "a persistent id of protocol 0": b"Pposix.system\n",
    "a text of lists": LAUGHS + b"0ctorch\ndevice\n(h\x3ctR",
    "a part many times": LAUGHS,
    "a part in itself": b"]q\x00h\x00a",
    "a fake long text": b"\x8d\xff\xff\xff\xff\xff\xff\x00\x00",
    "a fake long array of bytes": b"\x96\xff\xff\xff\xff\xff\x00\x00\x00",
    "an array of objects": b"cnumpy\ndtype\n(X\x01\x00\x00\x00OtR",
    "an unhashable key": b"c__builtin__\nset\n(](]etR",
    "no memo": b"h\x07",
    "an empty stack": b"0",
    "nothing": b"",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_one_line_and_changes_nothing(tmp_path, name):
    before = {full: dict(vars(found)) for full, found in torch_files._KNOWN.items()}
    raw(tmp_path / "file.pt", START + ATTACKS[name] + END)
    with pytest.raises(UserError, match=r"names posix.system|names torch._utils._re.*__globals__|is damaged") as caught:
        torch_files.read(tmp_path / "file.pt")
    assert "\n" not in str(caught.value)
    assert before == {full: dict(vars(found)) for full, found in torch_files._KNOWN.items()}
    assert not torch_files._tensor.__defaults__


def test_a_pickle_of_too_many_objects_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_files, "_MOST_OPCODES", 1000)
    raw(tmp_path / "file.pt", START + b"]" * 2000 + END)
    with pytest.raises(UserError, match="a pickle of more than 1000 objects"):
        torch_files.read(tmp_path / "file.pt")


def test_a_pickle_cannot_make_python_fill_the_memory(tmp_path):
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02Nr\xff\xff\xff\x7f.")
    with pytest.raises(UserError, match="object 2147483647 in a pickle of 9 bytes"):
        torch_files.read(path)


def test_compressed_entries_are_unpacked_up_to_a_bound_and_by_deflate_alone(tmp_path, monkeypatch):
    path = tmp_path / "file.pt"
    for how in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(path, "w", how) as archive:
            archive.writestr("a/data.pkl", START + b"}" + END)
            archive.writestr("a/byteorder", b"little" + b" " * (10_000 if how == zipfile.ZIP_DEFLATED else 0))
        with pytest.raises(
            UserError, match=r"a/byteorder would have \d+ bytes, and at most 64 are unpacked by deflate"
        ):
            torch_files.read(path)
    content = {name: np.full(100, number, np.float32) for number, name in enumerate("abc")}
    path = written(tmp_path, content, compresses=True)
    monkeypatch.setattr(torch_files, "_MOST_PACKED", 1200)
    assert torch_files.read(path).keys() == content.keys()
    monkeypatch.setattr(torch_files, "_MOST_PACKED", 1199)
    with pytest.raises(UserError, match="would have 400 bytes, and at most 399 are unpacked"):
        torch_files.read(path)


def test_an_entry_that_unpacks_to_more_than_it_says_is_refused(tmp_path):
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/byteorder", b"little" + b" " * 10_000)
        archive.writestr("a/data.pkl", START + b"}" + END)
    content = bytearray(path.read_bytes())
    at = content.rindex(b"a/byteorder") - 46 + 24  # the size in the directory
    content[at : at + 4] = (6).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        torch_files.read(path)


def test_keys_that_python_hashes_alike_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_files, "_MOST_LARGE", 3)
    path = written(tmp_path, {n * (2**61 - 1): n for n in range(1, 4)})
    assert len(torch_files.read(path)) == 3
    with pytest.raises(UserError, match="more than 3 integers of 61 bits and more"):
        torch_files.read(written(tmp_path, {n * (2**61 - 1): n for n in range(1, 5)}))


def test_what_functions_of_a_file_copy_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_files, "_MOST_BUILT", 100)
    many, more = ([Call("torch.Size", [1] * 10) for _ in range(n)] for n in (9, 10))
    assert torch_files.read(written(tmp_path, many)) == [(1,) * 10] * 9
    for content in (more, [Call("argparse.Namespace", state={f"f{n}": n for n in range(101)})]):
        with pytest.raises(UserError, match="its functions are given more than 100 items"):
            torch_files.read(written(tmp_path, content))
    with pytest.raises(UserError, match="a path or a device of more than 4096 characters"):
        torch_files.read(written(tmp_path, Call("torch.device", "x" * 5000)))


def test_a_class_of_texts_takes_no_state(tmp_path):
    raw(tmp_path / "file.pt", START + b"ctorch.torch_version\nTorchVersion\nN}X\x05\x00\x00\x00addedNs\x86b" + END)
    with pytest.raises(UserError, match="is damaged"):
        torch_files.read(tmp_path / "file.pt")
    assert not hasattr(torch_files._KNOWN["torch.torch_version.TorchVersion"], "added")


def test_storages_that_share_the_bytes_of_the_file_are_refused(tmp_path):
    import odd_files  # its table of files takes two seconds

    odd_files._overlapping(tmp_path / "file.pt", 3)
    with pytest.raises(UserError, match="storages overlap"):
        torch_files.read(tmp_path / "file.pt")
