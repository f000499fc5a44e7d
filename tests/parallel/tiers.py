"""Layouts of a test of parity: a short training by default, the whole one at night."""

from collections.abc import Mapping, Sequence

import pytest

from tests.parity import SHORT, Settings

Layouts = Mapping[str, Settings] | Sequence[Settings]
"""by name, or named by their keys"""


def train(by_default: Layouts, at_night: Layouts = (), few: Settings = SHORT) -> pytest.MarkDecorator:
    """Parametrize a test by the settings of each layout; of those of the default tier with the sizes of `few`."""
    cases = [pytest.param({**few, **settings}, id=name) for name, settings in named(by_default)]
    night = pytest.mark.exhaustive
    cases += [pytest.param(settings, id=f"{name} at night", marks=night) for name, settings in named(at_night)]
    return pytest.mark.parametrize("settings", cases)


def named(layouts: Layouts) -> list[tuple[str, Settings]]:
    if isinstance(layouts, Mapping):
        return list(layouts.items())
    return [(str(settings), settings) for settings in layouts]
