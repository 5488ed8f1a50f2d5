"""The configuration as anybody may see it: in manifests, reports and Snakemake's records."""

from __future__ import annotations

import re
from typing import Any

from .config import Config

HIDDEN = "(hidden)"
_SECRET = re.compile(r"key|token|passw|secret|credential", re.IGNORECASE)


def public_settings(config: Config) -> dict[str, Any]:
    """All settings but what may be a secret: environment values, arguments named like one, credentials in URLs."""
    settings = config.model_dump(mode="json")
    engine = settings["engine"]
    sglang = engine["sglang"]
    sglang["extra_environment"] = dict.fromkeys(sglang["extra_environment"], HIDDEN)
    sglang["arguments"] = {k: HIDDEN if _SECRET.search(k) else v for k, v in sglang["arguments"].items()}
    engine["external"]["urls"] = [without_credentials(url) for url in engine["external"]["urls"]]
    return settings


def without_credentials(url: str) -> str:
    """A URL as it may be shown: what stands before the @ is left out."""
    return re.sub(r"(\w://)[^/\s@]+@", r"\1***@", url)
