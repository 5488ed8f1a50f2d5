"""Write docs/config.md and schemas/config.schema.json: python scripts/document_config.py."""

import sys
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from shardmill.config import Config

ROOT = Path(__file__).resolve().parent.parent
INTRO = """# Configuration

Generated from `scripts/shardmill/config.py` by `python scripts/document_config.py`; do not edit by hand.

`snakemake` reads `config.yaml`. With `--configfile mine.yaml`, a file that names its own `model.source` stands alone;
one that does not is laid over `config.yaml`. `--config 'sampling={"max_tokens": 64}'` changes single keys on top.
Unknown keys, wrong types and combinations that cannot work are refused before anything runs.
"""


def config_markdown() -> str:
    """docs/config.md as text."""
    return INTRO + "".join(_section(name, field) for name, field in Config.model_fields.items())


def config_schema() -> bytes:
    """schemas/config.schema.json as bytes; editors complete and check YAML with it."""
    return orjson.dumps(Config.model_json_schema(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _section(path: str, field: Any, level: int = 2) -> str:
    model: type[BaseModel] = field.annotation
    about = field.description or (model.__doc__ or "").strip()
    rows, nested = [], []
    for name, inner in model.model_fields.items():
        if isinstance(inner.annotation, type) and issubclass(inner.annotation, BaseModel):
            nested.append(_section(f"{path}.{name}", inner, level + 1))
        else:
            rows.append(f"| `{name}` | {_type(inner)} | {_default(inner)} | {_cell(inner.description or '')} |")
    head = f"\n{'#' * level} `{path}`\n\n{(model.__doc__ or about).strip()}"
    if field.description and field.description != about:
        head += f" {field.description}"
    table = "\n\n| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) if rows else ""
    return f"{head}{table}\n" + "".join(nested)


def _type(field: Any) -> str:
    text = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    text = text.replace("typing.", "").replace("Any", "any value").replace("NoneType", "null").replace("None", "null")
    limits = [
        f"{sign} {getattr(rule, name)}" for rule in field.metadata for name, sign in _LIMITS if hasattr(rule, name)
    ]
    return _cell(text + (f" ({', '.join(limits)})" if limits else ""))


_LIMITS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("pattern", "matches"), ("min_length", "length >="))


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{orjson.dumps(value).decode()}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs" / "config.md").write_text(config_markdown(), encoding="utf-8")
    (ROOT / "schemas" / "config.schema.json").write_bytes(config_schema())
    sys.stderr.write("wrote docs/config.md and schemas/config.schema.json\n")
