"""Fixtures live next to what they start; here stands which tests must share a process.

`make test` runs two processes. Tests that use the resident workers or engines stay together in one of them, as do whole
runs, which begin in the background; all others go wherever there is room.
"""

import pytest

pytest_plugins = ["tests.pool.fixtures", "tests.engines.fixtures"]

RESIDENT = {"pool", "engine", "engines", "fresh"}


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of each test that has one."""
    for item in items:
        if "tests/system/" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group("whole-runs"))
        elif RESIDENT & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("resident"))
