"""Benchmarks: this package beside the usual ways, in one process. See README.md here."""
