"""Run folder, metrics and events."""
