"""Writes files as `torch.save` does, without PyTorch. This module serves the tests of their reader."""

import io
import pickle
import sys
import types
import zipfile
from unittest import mock

import numpy as np

STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage"}


class Call:
    """Is pickled as the call of a named function, whose result then gets a state."""

    def __init__(self, name, *arguments, state=None):
        self.name, self.arguments, self.state = name, arguments, state


class Storage:
    def __init__(self, array):
        self.array = array


class Pickler(pickle.Pickler):
    """Writes arrays as tensors, each with a storage of its own."""

    def __init__(self, file):
        super().__init__(file, protocol=2, fix_imports=False)
        self.storages = {}

    def persistent_id(self, item):
        if not isinstance(item, Storage):
            return None
        key = str(len(self.storages))
        self.storages[key] = item.array
        return ("storage", named(f"torch.{STORAGES[item.array.dtype.name]}"), key, "cpu", item.array.size)

    def reducer_override(self, item):
        if isinstance(item, np.ndarray):
            flat = np.array(item, order="C")
            strides = tuple(step // item.itemsize for step in flat.strides)
            return named("torch._utils._rebuild_tensor_v2"), (
                Storage(flat.reshape(-1)),
                0,
                item.shape,
                strides,
                False,
                {},
            )
        if isinstance(item, Call):
            return (named(item.name), item.arguments, *([item.state] if item.state is not None else []))
        return NotImplemented


def save(path, content, *, compresses=False):
    """Writes a file; numpy arrays become tensors."""
    file = io.BytesIO()
    with mock.patch.dict(sys.modules):
        pickler = Pickler(file)
        pickler.dump(content)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compresses else zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", file.getvalue())
        archive.writestr("archive/byteorder", "little")
        for key, array in pickler.storages.items():
            archive.writestr(f"archive/data/{key}", array.tobytes())


def named(full):
    """Returns a function that pickle writes as this name. It need not exist."""
    module, _, name = full.rpartition(".")
    for end in range(1, module.count(".") + 2):
        part = ".".join(module.split(".")[:end])
        sys.modules.setdefault(part, types.ModuleType(part))
    if not hasattr(sys.modules[module], name):

        def stand_in():
            pass

        stand_in.__module__, stand_in.__qualname__, stand_in.__name__ = module, name, name
        setattr(sys.modules[module], name, stand_in)
    return getattr(sys.modules[module], name)
