"""CPU seconds of the tests by room, by fixture and by test: `python -m pytest -p tests.cpu_seconds -n 2`.

Those of a process that a test starts and waits for are the test's; of one that several tests share, those of the test
that ends it. What no room has is spent on imports and on collecting the tests, once in each process of `-n`.
"""

import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

#: So many of the most expensive fixtures and tests are printed.
MOST = 20
REST = "imports and collection"


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Measured:
    """CPU seconds of a session, by its tests and fixtures."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.fixtures: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = cpu_seconds()
        result = yield
        self.tests[item.nodeid] += cpu_seconds() - before
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        before = cpu_seconds()
        result = yield
        self.fixtures[f"{fixturedef.baseid}::{fixturedef.argname} ({fixturedef.scope})"] += cpu_seconds() - before
        return result

    # After the last fixtures ended, and before a process of `-n` sends what it has.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not session.config.getoption("numprocesses", None):
            self.tests[REST] = cpu_seconds() - self.tests.total()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["cpu_seconds"] = dict(self.tests), dict(self.fixtures)

    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a process of `-n` measured."""
        # One that was killed has none.
        tests, fixtures = getattr(node, "workeroutput", {}).get("cpu_seconds", ({}, {}))
        self.tests.update(tests)
        self.fixtures.update(fixtures)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rooms: Counter[str] = Counter()
        for name, seconds in self.tests.items():
            parts = name.partition("::")[0].split("/")
            rooms["/".join(parts[:2]) if len(parts) > 2 else parts[0] if name == REST else "tests"] += seconds
        for title, seconds, count in (
            ("by room", rooms, len(rooms)),
            ("of setting up fixtures", self.fixtures, MOST),
            ("of tests with their fixtures", self.tests, MOST),
        ):
            terminalreporter.section(f"CPU seconds {title}, {seconds.total():.0f} in all")
            for name, value in seconds.most_common(count):
                terminalreporter.line(f"{value:7.1f}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Measured())
