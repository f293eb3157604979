"""PyTorch's own tests of its backends, from the installed wheel, each run by the processes of one test.

The suite takes its backend from the environment variable BACKEND and the number of ranks from WORLD_SIZE, and skips
what its tables do not list for a backend: `echo` is put there beside those that carry it. Its way to start ranks, a new
interpreter for each, would spend nearly all time on imports, so ranks are forked from a server that has imported it
all.
"""

import json
import multiprocessing
import os
import sys
import time
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.testing._internal.common_distributed as tables

for _known in tables.DistTestCases.backend_feature.values():
    if "gloo" in _known:
        _known.add("echo")
tables.DistTestCases.backend_feature["plugin"].add("echo")

# Its decorators read the tables when it is imported.
from torch.testing._internal.distributed import distributed_test  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402


def _with_environment(environment: dict[str, str], target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The server has the environment of its own start, and the suite passes folders to its ranks by variables; one of
    them, where ranks meet that make their group anew, it reads when it is imported."""
    os.environ.update(environment)
    distributed_test.INIT_METHOD = environment["INIT_METHOD"]
    target(*args, **kwargs)


class TorchSuite(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    """All tests of torch.testing._internal.distributed.distributed_test."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _spawn_processes(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])

        def process(target: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return context.Process(
                target=_with_environment, name=name, args=(dict(os.environ), target, *args), kwargs=kwargs
            )

        self._start_processes(process)


class Outcomes(unittest.TestResult):
    """Appends the outcome of each test to a file as soon as it is known, a JSON line [test, outcome, why, seconds]."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.began = path, 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.began = time.monotonic()

    def note(self, test: Any, outcome: str, why: str = "") -> None:
        line = json.dumps([test.id().split(".")[-1], outcome, why, round(time.monotonic() - self.began, 2)])
        # One write to a file that is open for appending: lines of several processes do not mix.
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode() + b"\n")
        os.close(file)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.note(test, "failed", self._exc_info_to_string(err, test))

    addError = addFailure

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.note(test, "passed")


def claimed(folder: str, name: str) -> bool:
    """Whether this process is the first to ask for the test in this folder."""
    try:
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def main(path: str, claims: str, *names: str) -> None:
    """Run the named tests, or all, each in children of this process; write their outcomes to `path`. Processes with the
    same folder `claims` share the tests, one at a time each."""
    torch.backends.cudnn.flags(enabled=True, allow_tf32=False).__enter__()
    outcomes = Outcomes(path)
    for name in names or unittest.TestLoader().getTestCaseNames(TorchSuite):
        if claimed(claims, name):
            unittest.TestSuite([TorchSuite(name)]).run(outcomes)


if __name__ == "__main__":
    # Not as __main__, which the ranks would import once more.
    import torch_suite

    torch_suite.main(*sys.argv[1:])
