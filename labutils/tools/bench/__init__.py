"""Benchmarks, apart from the course: `python -m labutils bench`."""
