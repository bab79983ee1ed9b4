"""One headless Chromium for all tests that look at a page."""
