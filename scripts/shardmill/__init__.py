"""Shardmill: prompts in, verified LLM completions out. This package knows nothing of Snakemake."""

__version__ = "0.1.0"
