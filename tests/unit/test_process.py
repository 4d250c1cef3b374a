"""What a process sets for a block is afterwards as it was before."""

import contextlib
import os
import signal
import threading

import pytest

from csc.distributed.process import environment, signal_handlers


def test_signals_are_handled_in_another_way_until_the_block_ends_however_it_does():
    heard: list[int] = []
    before = signal.getsignal(signal.SIGHUP)
    with contextlib.suppress(KeyError), signal_handlers({signal.SIGHUP: lambda number, _: heard.append(number)}):
        signal.raise_signal(signal.SIGHUP)
        raise KeyError
    assert heard == [signal.SIGHUP]
    assert signal.getsignal(signal.SIGHUP) is before


def test_outside_the_main_thread_signals_are_handled_as_before():
    before, seen = signal.getsignal(signal.SIGHUP), []

    def handle() -> None:
        with signal_handlers({signal.SIGHUP: signal.SIG_IGN}):
            seen.append(signal.getsignal(signal.SIGHUP))

    thread = threading.Thread(target=handle)
    thread.start()
    thread.join()
    assert seen == [before]


def test_variables_are_set_until_the_block_ends_however_it_does(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CSC_OLD", "old")
    monkeypatch.delenv("CSC_NEW", raising=False)
    with contextlib.suppress(KeyError), environment({"CSC_OLD": "other", "CSC_NEW": "new"}):
        assert (os.environ["CSC_OLD"], os.environ["CSC_NEW"]) == ("other", "new")
        raise KeyError
    assert os.environ["CSC_OLD"] == "old"
    assert "CSC_NEW" not in os.environ
