"""What tests of students share: texts, and the folder of a teacher."""

import pytest
import students


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory):
    return students.texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    return students.teachers(tmp_path_factory.mktemp("teacher"))
