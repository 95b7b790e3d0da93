"""What tests of students share: texts, and the folder of a teacher."""

import asking
import pytest


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory):
    return asking.write_prompts(tmp_path_factory.mktemp("texts"), 20)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    return asking.teachers(tmp_path_factory.mktemp("teacher"))
