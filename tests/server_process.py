"""A database server or broker as one process that a test stops, pauses and kills."""

from __future__ import annotations

import ctypes
import signal
import subprocess

from tests.servers import PATIENCE_SECONDS

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """For ``preexec_fn``: the process is killed when the one that starts it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ServerProcess:
    process: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        """Stop the server cleanly."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_SECONDS)
        self.process = None

    def pause(self) -> None:
        """Freeze the server: connections stay open but get no response."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
