"""A tiny language model and the real llama.cpp server that runs it, for the tests."""
