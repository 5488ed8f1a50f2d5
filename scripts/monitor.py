"""See a run: python scripts/monitor.py [--once | --json | --serve PORT]. Needs no running Snakemake."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from shardmill import logs

if TYPE_CHECKING:
    from shardmill.config import Config


def main() -> int:
    parser = argparse.ArgumentParser(description="See a run from another shell.")
    parser.add_argument("--configfile", help="the run's configuration (default: config.yaml)")
    parser.add_argument("--run", metavar="NAME", help="name of the run, if not the configuration's")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print it once, as plain text")
    how.add_argument("--json", action="store_true", help="print it once, as one JSON object")
    how.add_argument("--serve", metavar="PORT", type=int, help="show it as a web page, with /metrics for Prometheus")
    parser.add_argument("--host", default="127.0.0.1", help="address for --serve (default: %(default)s)")
    parser.add_argument("--every", metavar="SECONDS", type=float, default=2.0, help="between two looks (%(default)s)")
    arguments = parser.parse_args()
    logs.configure(None)
    from shardmill.monitor.choose import choose_run

    config = choose_run(configfile=arguments.configfile, run=arguments.run)
    try:
        return _show(config, arguments)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        return 0


def _show(config: Config, arguments: argparse.Namespace) -> int:
    from shardmill.monitor.observer import Observer

    observer = Observer(config)
    if arguments.json:
        import orjson

        sys.stdout.buffer.write(orjson.dumps(observer.snapshot(), option=orjson.OPT_APPEND_NEWLINE))
    elif arguments.serve is not None:
        from shardmill.monitor.web import serve

        serve(observer, arguments.host, arguments.serve, every=arguments.every)
    else:
        from shardmill.monitor import view

        if arguments.once:
            view.print_once(observer.snapshot())
        else:
            view.watch(observer.snapshot, max(0.2, arguments.every))
    return 0


if __name__ == "__main__":
    sys.exit(main())
