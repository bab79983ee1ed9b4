"""Fixtures live next to what they start; this file only lists them."""

pytest_plugins = ["tests.pool.fixtures", "tests.engines.fixtures", "tests.browser.fixtures"]
