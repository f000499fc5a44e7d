import logging
import threading
import time

import pytest

from torchllm.runtime.signs_of_life import show_progress, signs_of_life
from torchllm.tools.launch.rank_start import _appears


def test_what_takes_long_says_so_and_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    threads = threading.active_count()
    with caplog.at_level(logging.INFO), signs_of_life("evaluate", interval=0.05):
        assert _appears(lambda: len(caplog.messages) >= 2, patience=20)  # a function that takes long
    assert caplog.messages[0] == "evaluate: 0 s so far, in _appears (rank_start.py)"
    assert threading.active_count() == threads  # none speaks after it


def test_work_that_says_how_far_it_is_is_logged_so(caplog: pytest.LogCaptureFixture) -> None:
    show_progress("3 of 4".format)  # of earlier work, without signs of life
    for progress, expected in ((None, ""), ("2 of 8 sequences".format, ", 2 of 8 sequences"), (None, "")):
        caplog.clear()
        with caplog.at_level(logging.INFO), signs_of_life("evaluate", interval=0.05):
            if progress is not None:
                show_progress(progress)
            while not caplog.messages:
                time.sleep(0.01)
        assert caplog.messages[0] == f"evaluate: 0 s so far{expected}"  # the next work does not go on with it


def test_what_is_quick_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), signs_of_life("evaluate"):
        pass
    assert caplog.messages == []
