"""Command line of the stand-in: SGLang's own launch options, checked as SGLang checks them, and a few of its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .answers import Lengths

FLAGS = Path(__file__).parents[2] / "scripts" / "shardmill" / "engines" / "sglang_flags.tsv"
VERSIONS = ("0.5.11", "0.5.23")
_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "json": json.loads}


def build_parser(version: str) -> argparse.ArgumentParser:
    """Parser with every launch option of this SGLang version and the stand-in's own (`--standin-...`)."""
    parser = argparse.ArgumentParser(prog="launch_server.py")
    for line in FLAGS.read_text().splitlines():
        if not line.startswith("#"):
            _add_flag(parser, line, version)
    own = parser.add_argument_group("stand-in")
    own.add_argument("--standin-version", choices=VERSIONS, default=VERSIONS[-1], help="whose shapes to show")
    own.add_argument("--standin-boot-delay", type=float, default=0.0, metavar="S", help="seconds before the port opens")
    own.add_argument(
        "--standin-time-scale", type=float, default=1.0, metavar="X", help="all times of the batch, times X"
    )
    own.add_argument(
        "--standin-speed", type=float, default=1.0, metavar="X", help="speed of this GPU; 0.83 is 17 %% slow"
    )
    own.add_argument(
        "--standin-step-ms",
        default="3.72,0.356,0.02",
        metavar="A,B,P",
        help="a step with b requests takes A+B*b ms, a prompt token P ms (default: 245 tok/s alone, 2300 with 48)",
    )
    own.add_argument(
        "--standin-lengths", default="600,0.6,16384", metavar="MEAN,SIGMA,CAP", help="log-normal, in tokens"
    )
    own.add_argument(
        "--standin-thought", type=float, default=0.6, metavar="X", help="share of an answer that is thought"
    )
    own.add_argument("--standin-accept-length", type=float, default=3.6, metavar="X", help="shown with speculation on")
    own.add_argument(
        "--standin-hybrid-slots", type=int, metavar="N", help="a hybrid model whose state pool has N slots"
    )
    own.add_argument("--standin-faults", default="{}", metavar="JSON", help="see faults.py")
    own.add_argument("--standin-record", "--record", type=Path, metavar="FILE", help="JSON lines of all requests")
    return parser


def _add_flag(parser: argparse.ArgumentParser, line: str, version: str) -> None:
    options, dest, kind, default, choices, versions = line.split("\t")
    if version not in versions.split(" "):
        return
    rest: dict[str, Any] = {"dest": dest, "default": json.loads(default)}
    if kind == "flag":
        rest["action"] = "store_true"
    elif kind == "switch":
        rest["action"] = argparse.BooleanOptionalAction
    else:
        base = kind.rstrip("+*?")
        rest["type"] = _TYPES[base]
        if kind != base:
            rest["nargs"] = kind[len(base) :]
        if choices:
            rest["choices"] = json.loads(choices)
    rest["required"] = dest == "model_path"
    parser.add_argument(*options.split(","), **rest)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line; exits with 2 and argparse's message for what SGLang would reject too."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--standin-version", choices=VERSIONS, default=VERSIONS[-1])
    version = first.parse_known_args(argv)[0].standin_version
    parser = build_parser(version)
    args = parser.parse_args(argv)
    try:
        args.step_ms = [float(part) for part in args.standin_step_ms.split(",")]
        mean, sigma, cap = args.standin_lengths.split(",")
        args.lengths = Lengths(float(mean), float(sigma), int(cap), args.standin_thought)
        args.faults = json.loads(args.standin_faults)
        _base, _per_job, _prefill = args.step_ms
    except ValueError as error:
        parser.error(f"a --standin- option cannot be read: {error}")
    args.served_model_name = args.served_model_name or args.model_path
    args.tokenizer_path = args.tokenizer_path or args.model_path
    args.random_seed = 42 if args.random_seed is None else args.random_seed
    return args


def server_args(args: argparse.Namespace) -> dict[str, Any]:
    """SGLang's own settings among the parsed ones, as /server_info shows them."""
    own = {"step_ms", "lengths", "faults", "context", "pool", "effective", "config"}
    return {k: v for k, v in vars(args).items() if k not in own and not k.startswith("standin_")}


def resolve(args: argparse.Namespace) -> list[str]:
    """Set `context_length`, `max_total_tokens` and `effective` (requests run at once) as SGLang would; returns log
    lines.

    With speculation and no --max-running-requests the latter silently becomes 48. A hybrid model's pool of states
    limits it too: N slots at the default --mamba-full-memory-ratio of 0.9, several of them per request unless the
    radix cache is off. SGLang 0.5.23 logs that cap, 0.5.11 does not. Source: SGLang's speculative_hook.py,
    kv_cache_configurator.py.
    """
    lines = []
    args.context = args.context_length or 32768
    args.pool = args.max_total_tokens or 1_000_000
    if args.speculative_algorithm:
        args.speculative_algorithm = {"NEXTN": "EAGLE"}.get(args.speculative_algorithm, args.speculative_algorithm)
        if args.max_running_requests is None:
            args.max_running_requests = 48
            lines.append(
                "Max running requests is reset to 48 for speculative decoding. You can override this by explicitly "
                "setting --max-running-requests."
            )
    wanted = args.max_running_requests
    if wanted is None:
        wanted = max(min(args.pool * 512 // args.context, 4096), 2048)
    args.effective = max(1, min(wanted // max(1, args.dp_size), args.pool // 2))
    if args.standin_hybrid_slots:
        _cap_by_states(args, lines)
    return lines


def _cap_by_states(args: argparse.Namespace, lines: list[str]) -> None:
    ratio = args.mamba_full_memory_ratio or 0.9
    slots = args.max_mamba_cache_size or int(args.standin_hybrid_slots * (ratio / (1 + ratio)) / (0.9 / 1.9))
    args.max_mamba_cache_size = slots
    strategy = getattr(args, "mamba_radix_cache_strategy", None) or getattr(args, "mamba_scheduler_strategy", None)
    per_request = 1 if args.disable_radix_cache else 5 if strategy == "extra_buffer" else 3
    cap = slots // per_request
    if cap < 1:
        raise SystemExit("Hybrid (mamba/linear-attention) state cache is too small to serve any requests.")
    if cap < args.effective:
        args.effective = cap
        if args.standin_version != "0.5.11":
            lines.append(
                f"max_running_requests is capped to {cap} by the mamba state cache (max_mamba_cache_size={slots}, "
                f"{per_request} state slots per request). To raise it: increase --mamba-full-memory-ratio or "
                "--max-mamba-cache-size, or halve the state size with --mamba-ssm-dtype bfloat16."
            )
