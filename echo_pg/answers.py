"""Calls that may never return: a question to a store whose server is stopped or out of reach, the connection to a
process that has ended."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any


def on_thread(name: str, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
    """What call(*arguments) returns or raises. The thread holds up no end of the interpreter."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call(*arguments))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def answer_within(seconds: float, question: Callable[..., Any], *arguments: Any) -> Any:
    """What question(*arguments) returns or raises; TimeoutError after `seconds`. It stays behind on its thread then,
    until it is answered. Ctrl-C ends the wait."""
    outcome = on_thread("echo-ask", question, *arguments)
    if not wait([outcome], seconds).done:
        raise TimeoutError("the store does not answer")
    return outcome.result()
