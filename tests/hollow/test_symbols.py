"""The stand-in has all that the installed torch and Triton look up."""

import pytest

from tests.hollow import symbols


def test_no_name_is_missing() -> None:
    """A new release that asks for more fails here, and not by a crash: write the function, or list it in absent.txt."""
    assert symbols.missing() == []


def test_the_list_of_absent_names_has_none_that_the_stand_in_has() -> None:
    assert symbols.absent() & symbols.exported() == set()


def test_a_name_that_the_stand_in_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Triton 3.9, without which its compiled kernels do not load."""
    without = symbols.exported() - {"cuCtxSetCurrent"}
    monkeypatch.setattr(symbols, "exported", lambda: without)
    assert symbols.missing() == ["cuCtxSetCurrent"]
