import pytest

from zerojax.data import source


@pytest.fixture(scope="session")
def stdlib_dir(tmp_path_factory):
    """Prepares python_stdlib once: under a second, 3.5 MB on disk."""
    data_dir = tmp_path_factory.mktemp("datasets")
    source.prepare("python_stdlib", data_dir)
    return data_dir
