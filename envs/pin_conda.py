"""Write envs/pipeline.yaml from the lock file: python envs/pin_conda.py. Standard library only; part of `make lock`."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEAD = """# For `snakemake --sdm conda`: what the scripts import, at the versions of requirements.lock.
# Made from it by envs/pin_conda.py. Everything but Python and pip comes from PyPI, as in the other environment.
channels:
  - conda-forge
  - nodefaults
dependencies:
  - python=3.12
"""


def conda_environment() -> str:
    """envs/pipeline.yaml as text."""
    wanted = [
        re.split(r"[=<> \[]", line)[0].lower()
        for line in (HERE / "requirements.in").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    pins = dict(re.findall(r"^([a-z0-9._-]+)==([^ ;\\]+)", (HERE / "requirements.lock").read_text(), re.MULTILINE))
    rows = [f"      - {name}=={pins[name]}\n" for name in wanted if name not in ("snakemake", "pip")]
    return f"{HEAD}  - pip={pins['pip']}\n  - pip:\n{''.join(rows)}"


if __name__ == "__main__":
    (HERE / "pipeline.yaml").write_text(conda_environment())
