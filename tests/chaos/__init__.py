"""Chaos: whole runs on real servers under seeded faults, and a checker that shares no code with the pipeline.

python -m tests.chaos --runs N --seed S
"""
