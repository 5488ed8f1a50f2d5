"""Judging answers."""
