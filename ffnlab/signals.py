"""Signals that ask a process to stop: noted, and acted on where it does no harm."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# What a scheduler, a terminal that is closed and a person send.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Interrupted(BaseException):
    """A signal asked the run to stop; what could be saved is saved. ``exit_code`` is the shell's 128 + signal.

    Like KeyboardInterrupt it is no Exception, so that nobody who shields a run from failures swallows it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 129 for a terminal that was closed, 143 for SIGTERM and SIGUSR1 (Slurm's warning of it)."""
        return 128 + (signal.SIGTERM if self.signum == signal.SIGUSR1 else self.signum)


class Signals:
    """Takes the signals of this process over; a context manager, which gives them back.

    A signal is noted in ``signum``, and whoever is at work asks by ``check`` where it can stop. Within ``at_once``,
    for long work that leaves nothing to save, it stops that work wherever it stands. A second Ctrl-C quits in any case.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.signum: int | None = None  # the first that came
        self.quiet = quiet  # another process tells the person at the keyboard
        self._at_once = self._raised = False
        self._times_ctrl_c = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        """Take them over, if this is the thread that can; what ``nohup`` ignores stays ignored."""
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        """Give them back."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def take_back(self) -> None:
        """Take over again what a library has taken meanwhile."""
        for signum in self._before:
            signal.signal(signum, self._note)

    def check(self) -> None:
        """Stop here, if a signal came.

        Raises:
            Interrupted: it did.
        """
        if self.signum is not None:
            raise Interrupted(self.signum)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this block a signal stops the work wherever it stands, in any library.

        Raises:
            Interrupted: also in place of an error that a library made of it on its way (an import that is stopped ends
                in ImportError), and after a library that swallowed it.
        """
        before, self._at_once = self._at_once, True
        try:
            self.check()
            yield
        except Exception as error:
            if self._raised:
                raise Interrupted(self.signum or signal.SIGTERM) from error
            raise
        finally:
            self._at_once = before
        self.check()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            self._times_ctrl_c += 1
            if self._times_ctrl_c > 1:
                os._exit(130)
        if self.signum is not None:
            return
        self.signum = signum
        if self._at_once:
            self._raised = True
            raise Interrupted(signum)
        if signum == signal.SIGINT and not self.quiet:
            os.write(2, b"\nstopping after this step; Ctrl-C again quits at once\n")


def leave_signals_to_parent() -> None:
    """Let no signal end this process while it waits for work: the process that gave it some decides.

    A terminal and ``timeout`` send a signal to all processes of a command. A pool takes the death of one idle worker
    for a failure, and kills the others in the middle of their work.
    """
    for signum in SIGNALS:
        signal.signal(signum, lambda *_: None)  # not SIG_IGN, which processes started from here would inherit
