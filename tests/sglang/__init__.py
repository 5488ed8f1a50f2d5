"""SGLang for tests: the real server on CPU, and a stand-in for what a CPU cannot show."""
