"""A failure and the properties of a test are printed when the test ends, not when all have ended: there may be a limit
of time, and whatever was found before it shall be known."""

import pytest


class AtOnce:
    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.ensure_newline()
            self.terminal.write_line(report.longreprtext)
        if report.when == "teardown":
            for name, value in report.user_properties:
                self.terminal.ensure_newline()
                self.terminal.write_line(f"property {name} = {value}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(AtOnce(terminal))
