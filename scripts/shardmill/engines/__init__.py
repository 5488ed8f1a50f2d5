"""Adapters for the inference engines."""
