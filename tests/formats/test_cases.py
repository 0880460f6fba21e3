"""Every case of `tests/data/formats` is opened by its path alone, and has the expected content."""

from pathlib import Path

import pytest

from tests.formats.cases import CASES, check_case, load, open_case


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name.removesuffix(".case.json"))
def test_a_file_of_another_system_has_the_expected_content(path: Path) -> None:
    case = load(path)
    check_case(case, open_case(case))
