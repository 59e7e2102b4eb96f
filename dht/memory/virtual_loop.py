"""asyncio on virtual time: an hour takes a millisecond, and a deadlock is an error.

``run`` corresponds to ``asyncio.run`` and is stricter: tasks left over at the end, exceptions that
were not retrieved, real sockets, and waiting for an event that can never happen are errors.

The order of iteration over a set of tasks follows from their hashes, and asyncio keeps such sets
(``TaskGroup``, ``wait``). Therefore tasks and futures of this loop hash to numbers that they get
when they are first put into a set, so that a program runs the same way each time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, NoReturn, TypeVar, cast

from dht.memory.event_heap import EventHeap, Timer

T = TypeVar("T")

TIME_MAX_S = 30 * 24 * 3600.0


class Deadlock(RuntimeError):
    """Nothing is scheduled but the main coroutine is not done: it would wait for ever."""


class TimeIsOver(RuntimeError):
    """The main coroutine is not done within the limit of virtual time."""


class LeftoverTasks(RuntimeError):
    """The main coroutine returned while tasks that it started were still running."""


class RealInputOutput(RuntimeError):
    """The virtual loop was asked for a socket, a signal or a process."""


def _number_of(one: _Task | _Future) -> int:
    try:
        return one._number
    except AttributeError:  # it is put into a set for the first time
        one._number = cast(VirtualLoop, one.get_loop()).next_number()
        return one._number


class _Task(asyncio.Task[Any]):
    __slots__ = ("_number",)
    _number: int
    __hash__ = _number_of


class _Future(asyncio.Future[Any]):
    __slots__ = ("_number",)
    _number: int
    __hash__ = _number_of


class _Call:
    """The result of ``call_soon``: an ``asyncio.Handle`` without that class's debug mode."""

    __slots__ = ("_args", "_callback", "_context", "_loop", "is_cancelled")

    def __init__(
        self,
        loop: VirtualLoop,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def run(self) -> None:
        try:
            self._context.run(self._callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            message = f"exception in callback {self._callback!r}"
            self._loop.call_exception_handler({"message": message, "exception": error})


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with the time of an ``EventHeap`` and without input and output."""

    _ready: deque[_Call]
    _closed: bool
    _stopping: bool

    def __init__(self, *, seed: int = 0, time_max_s: float = TIME_MAX_S) -> None:
        super().__init__()
        self.heap = EventHeap()
        self.seed = seed
        self.unhandled: list[BaseException] = []
        """Exceptions that were not retrieved."""
        self._ends_at = self.heap.now + time_max_s
        self._numbers = 0
        self._tasks_made = 0
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_unhandled)

    def next_number(self) -> int:
        """The hash of the next task or future that is put into a set."""
        self._numbers += 1
        return self._numbers

    def time(self) -> float:
        return self.heap.now

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Call:
        if self._closed:
            raise RuntimeError("the event loop is closed")
        call = _Call(self, callback, args, context)
        self._ready.append(call)
        return call

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Timer:
        if self._closed:
            raise RuntimeError("the event loop is closed")
        return self.heap.call_at(when, _Call(self, callback, args, context).run)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Timer:
        return self.call_at(self.heap.now + delay, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run the function at once: the end of another thread's work cannot be repeated."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def waiting(self) -> list[str]:
        """One line for each unfinished task, in the order of their creation."""
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        return [_describe(task) for task in tasks]

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        self._tasks_made += 1
        if options.get("name") is None:
            options["name"] = f"task-{self._tasks_made}"  # asyncio's own count goes on between runs
        return _Task(coroutine, loop=self, **options)

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        error.add_note(f"reported to the event loop: {context['message']}")
        self.unhandled.append(error)

    def _run_once(self) -> None:
        """Run calls until the loop is told to stop; let time pass whenever there is none to run.

        The base class makes one round of the calls that are ready, asks its selector, and keeps
        timers of its own. Here nothing comes from outside, so calls run as long as there are any,
        and timers are events of the heap like all others.
        """
        ready, heap = self._ready, self.heap
        while not self._stopping:
            if ready:
                call = ready.popleft()
                if not call.is_cancelled:
                    call.run()
            elif not heap.run_while(ready, self._ends_at):
                if len(heap):
                    self._end_of_time()
                waiting = self.waiting()
                raise Deadlock(_list("nothing is scheduled, and these wait for ever", waiting))

    def _end_of_time(self) -> NoReturn:
        raise TimeIsOver(_list(f"it is {self.time():g} s, and these still run", self.waiting()))

    # --- other methods that asyncio requires -----------------------------------------------

    def _write_to_self(self) -> None:
        pass


def _refuse(self: object, *args: object, **options: object) -> NoReturn:
    raise RealInputOutput("the virtual loop has no sockets, signals or processes; use a real loop")


for _name in (
    "add_reader",
    "add_signal_handler",
    "add_writer",
    "connect_accepted_socket",
    "connect_read_pipe",
    "connect_write_pipe",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getaddrinfo",
    "getnameinfo",
    "sendfile",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_sendall",
    "start_tls",
    "subprocess_exec",
    "subprocess_shell",
):
    setattr(VirtualLoop, _name, _refuse)


def run(main: Coroutine[Any, Any, T], *, seed: int = 0, time_max_s: float = TIME_MAX_S) -> T:
    """Run a coroutine on virtual time and return its result.

    ``seed`` is the seed of ``MemoryNetwork`` and others. Raises the exception of ``main``, else
    ``Deadlock``, ``TimeIsOver``, ``LeftoverTasks``, or an ``ExceptionGroup`` of the exceptions that
    were not retrieved.
    """
    loop = VirtualLoop(seed=seed, time_max_s=time_max_s)
    try:
        result = loop.run_until_complete(main)
        leftover = loop.waiting()
        _cancel_all(loop)
        if loop.unhandled:
            errors = [error for error in loop.unhandled if isinstance(error, Exception)]
            raise ExceptionGroup("exceptions that were not retrieved", errors)
        if leftover:
            raise LeftoverTasks(_list("still running at the end", leftover))
        return result
    finally:
        try:
            _cancel_all(loop)
        finally:
            loop.close()


def running_loop() -> VirtualLoop:
    """The running virtual loop. Raises ``RuntimeError`` on any other loop."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise RuntimeError(f"this runs on {type(loop).__name__}; use dht.memory.host.run")
    return loop


def _cancel_all(loop: VirtualLoop) -> None:
    tasks = sorted(asyncio.all_tasks(loop), key=hash)
    if not tasks:
        return
    for task in tasks:
        task.cancel()
    # A task that does not end within a virtual minute is abandoned.
    ended = asyncio.wait(tasks, timeout=60.0)
    loop._ends_at = loop.time() + 120.0
    loop.run_until_complete(ended)
    loop.run_until_complete(loop.shutdown_asyncgens())
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # retrieved: the test has failed already, for a better reason


def _describe(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = ""
    if frames:
        code = frames[-1].f_code
        where = f" at {code.co_filename}:{frames[-1].f_lineno}"
    coroutine = task.get_coro()
    name = getattr(coroutine, "__qualname__", repr(coroutine))
    return f"{task.get_name()} ({name}){where}"


def _list(what: str, lines: list[str]) -> str:
    return "\n    ".join([f"{what}:", *lines])
