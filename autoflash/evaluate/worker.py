"""A process that runs what may crash, hang or poison its CUDA context, and is replaced when it does."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, ParamSpec, TypeVar

from autoflash.evaluate.worker_main import HEADER, import_module
from autoflash.trial import Status

P = ParamSpec("P")
T = TypeVar("T")

# A start imports torch, which takes minutes where many processes do so at once.
_START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 60.0
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request has no result.

    Attributes:
        status: TIMEOUT where it was killed for taking too long, RUNTIME where it crashed or raised.
        detail: One line.
    """

    status: Status
    detail: str


class WorkerClosedError(RuntimeError):
    """A worker was asked after it was closed."""


class Worker:
    """One child process in a session of its own, started when first needed and restarted after a failure.

    Not thread-safe. The child is killed with its whole process group when a request takes too long, when the worker
    is closed, and by the kernel when the thread that started it ends. What it prints goes to a file whose end explains
    a crash.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: BinaryIO | None = None
        self._replies = -1
        self._log: BinaryIO | None = None
        self._log_start = 0
        self._imported: set[str] = set()
        self._closed = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> Failure | None:
        """Start the child if there is none, and wait until it answers.

        Returns:
            Why it did not; None when it is ready.
        """
        if self._process is not None and self._process.poll() is None:
            return None
        self.restart()
        self._spawn()
        reply = self._exchange(os.getpid, (), _START_TIMEOUT_S)
        return reply if isinstance(reply, Failure) else None

    def call(self, function: Callable[P, T], timeout_s: float, /, *args: P.args, **kwargs: P.kwargs) -> T | Failure:
        """Run a module-level function in the child.

        Args:
            function: Importable there by its module and name.
            timeout_s: Wall clock from the request to the answer, without the child's start and imports.
            *args: Picklable positional arguments; keywords are not passed.
            **kwargs: None; they exist for the type of ``function`` only.
        """
        if kwargs:
            raise TypeError("a worker takes positional arguments only")
        failure = self.start() or self._import(function.__module__)
        if failure is not None:
            return failure
        return self._exchange(function, args, timeout_s)

    def restart(self) -> None:
        """Kill the child; the next request starts another."""
        process, self._process = self._process, None
        self._imported.clear()
        if process is not None:
            _kill_group(process)
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._replies >= 0:
            os.close(self._replies)
            self._replies = -1
        if self._log is not None:
            self._log.close()
            self._log = None

    def interrupt(self) -> None:
        """Kill the child for good from another thread; a request under way fails."""
        self._closed = True
        process = self._process
        if process is not None:
            _signal_group(process)

    def finish(self) -> None:
        """Let an idle child end by itself, for tools that sum up what they saw of it; kill it where it does not."""
        self._closed = True
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
        self.restart()

    def close(self) -> None:
        """Kill the child for good."""
        self._closed = True
        self.restart()

    def _spawn(self) -> None:
        if self._closed:
            raise WorkerClosedError("this worker is closed")
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the child
        # The child sees the same modules as this process, wherever they were found.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from autoflash.evaluate.worker_main import main\n"
            f"main({request_read}, {reply_write}, {os.getpid()})"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(request_read, reply_write),
                start_new_session=True,
            )
        finally:
            os.close(request_read)
            os.close(reply_write)
        self._requests = os.fdopen(request_write, "wb")
        self._replies = reply_read
        # Another thread may have interrupted it before there was a process to kill.
        if self._was_closed():
            self.restart()
            raise WorkerClosedError("this worker is closed")

    def _was_closed(self) -> bool:
        return self._closed

    def _import(self, module: str) -> Failure | None:
        """Import what a request needs, so that its time-out does not pay for it."""
        if module in self._imported:
            return None
        reply = self._exchange(import_module, (module,), _START_TIMEOUT_S)
        if isinstance(reply, Failure):
            return reply
        self._imported.add(module)
        return None

    def _exchange(self, function: Callable[..., T], arguments: tuple[object, ...], timeout_s: float) -> T | Failure:
        request = pickle.dumps((function, arguments))
        deadline = time.monotonic() + timeout_s
        assert self._requests is not None
        assert self._log is not None
        # What earlier requests printed says nothing about this one.
        self._log_start = os.fstat(self._log.fileno()).st_size
        try:
            self._requests.write(HEADER.pack(len(request)) + request)
            self._requests.flush()
            header = self._read(HEADER.size, deadline)
            content = self._read(HEADER.unpack(header)[0], deadline)
        except TimeoutError:
            self.restart()
            return Failure(status=Status.TIMEOUT, detail=f"no answer within {timeout_s:g} s; killed")
        except (BrokenPipeError, EOFError):
            detail = self._epitaph()
            self.restart()
            return Failure(status=Status.RUNTIME, detail=detail)
        except BaseException:
            # Interrupted between request and answer: the next request must not read this one's answer.
            self.restart()
            raise
        succeeded, value = pickle.loads(content)
        if succeeded:
            result: T = value
            return result
        return Failure(status=Status.RUNTIME, detail=value)

    def _read(self, count: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < count:
            remaining = deadline - time.monotonic()
            ready, _, _ = select.select([self._replies], [], [], max(0.0, remaining))
            if not ready:
                raise TimeoutError
            part = os.read(self._replies, count - len(content))
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    def _epitaph(self) -> str:
        """How the child ended, and the last thing that it printed."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "the worker closed its pipe"
        end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        last = self._last_line()
        return (
            f"the worker was {end}: {last}" if last and code < 0 else f"the worker {end}" + (f": {last}" * bool(last))
        )

    def _last_line(self) -> str:
        assert self._log is not None
        file = self._log.fileno()
        size = os.fstat(file).st_size
        start = max(self._log_start, size - _TAIL_BYTES)
        lines = [line.strip() for line in os.pread(file, size - start, start).decode(errors="replace").splitlines()]
        lines = [line for line in lines if line]
        return lines[-1][:300] if lines else ""


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a child and everything that it started."""
    _signal_group(process)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # It has ended, or has not yet made its own session.
        process.kill()
