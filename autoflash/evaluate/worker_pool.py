"""Several workers, each of which is asked by a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from autoflash.evaluate.worker import Worker, WorkerClosedError

T = TypeVar("T")


class WorkerPool:
    """Runs tasks in the order in which they are submitted; a process starts when there is work for it."""

    def __init__(self, processes: int, *, name: str) -> None:
        """Start nothing yet.

        Args:
            processes: At most so many run at a time.
            name: Of the threads, for whoever looks at a stack.
        """
        self._threads = ThreadPoolExecutor(max_workers=processes, thread_name_prefix=name)
        self._local = threading.local()
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, task: Callable[[Worker], T]) -> Future[T]:
        """Run a task with the worker of a free thread; it is cancelled where the pool is closed meanwhile."""
        return self._threads.submit(self._run, task)

    def finish(self) -> None:
        """Once every task is done: let the processes end by themselves, for tools that sum up what they saw of them."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        # While their threads live: a child is killed with the thread that started it.
        with ThreadPoolExecutor(max_workers=len(workers) or 1) as threads:
            list(threads.map(Worker.finish, workers))

    def close(self) -> None:
        """Forget what waits, kill what runs."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.interrupt()
        self._threads.shutdown(wait=True)
        for worker in workers:
            worker.close()

    def _run(self, task: Callable[[Worker], T]) -> T:
        try:
            return task(self._worker())
        except WorkerClosedError:
            raise CancelledError from None

    def _worker(self) -> Worker:
        """The process of this thread."""
        worker: Worker | None = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = Worker()
            with self._lock:
                if self._closed:
                    raise CancelledError
                self._workers.append(worker)
        return worker
