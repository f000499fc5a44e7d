"""`python -m evidence`: each command reads its files and prints, or writes."""

from pathlib import Path

import pytest

from evidence.__main__ import main
from tests.evidence.tables import made, write_rows


@pytest.mark.parametrize(
    ("command", "printed"),
    [("score", "median"), ("leave-out fold", "fold"), ("intervals", "interval"), ("picks", "pick")],
)
def test_files_are_judged(command: str, printed: str, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "rows.csv", made()[:6])
    assert printed in main([*command.split(), table])


def test_a_wrong_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scores"])
    assert "leave-out" in capsys.readouterr().err
