"""Checks files of torch.save, good and hostile. This module tests zerojax.interop.deepspeed.torch_files."""

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
from zerojax.interop.deepspeed import torch_files

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "deepspeed"


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


HOSTILE = "posix.system builtins.eval builtins.getattr subprocess.Popen torch.load torch.hub.load numpy.core.multiarray._reconstruct"


@pytest.mark.parametrize("name", HOSTILE.split())
def test_any_other_name_is_refused_and_runs_nothing(tmp_path, name):
    trace = tmp_path / "trace"
    content = {"good": np.ones(3, np.float32), "bad": Call(name, f"touch {trace}")}
    with pytest.raises(
        UserError, match=rf"file.pt: names {name}, which is neither a tensor nor a plain value"
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


def test_a_pickle_cannot_make_python_fill_the_memory(tmp_path):
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02Nr\xff\xff\xff\x7f.")
    with pytest.raises(UserError, match="object 2147483647 in a pickle of 9 bytes"):
        torch_files.read(path)
