"""Measurements that anyone can repeat; docs/benchmarks.md says what they showed."""
