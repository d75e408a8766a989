"""Fast tests in one process."""
