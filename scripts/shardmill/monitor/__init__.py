"""Seeing a run: samples, history, alarms, and the views of them."""
