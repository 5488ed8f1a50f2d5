"""Make a run's report, finished or not: python scripts/report.py [--run NAME | --configfile FILE]."""

import argparse
import sys

from shardmill import job, logs
from shardmill.config import Config
from shardmill.logs import get_logger
from shardmill.monitor.choose import choose_run
from shardmill.report.page import write_report


def from_command_line() -> Config:
    """The configuration of the run that the command line names."""
    parser = argparse.ArgumentParser(description="Make a run's report, whether it is finished or not.")
    parser.add_argument("--configfile", help="the run's configuration (default: config.yaml)")
    parser.add_argument("--run", metavar="NAME", help="name of the run, if not the configuration's")
    arguments = parser.parse_args()
    logs.configure(None)
    return choose_run(configfile=arguments.configfile, run=arguments.run)


if __name__ == "__main__":
    snakemake = globals().get("snakemake")
    config = job.enter(snakemake).config if snakemake is not None else from_command_line()
    path = write_report(config)
    get_logger("report").info("report: %s", path)
    sys.exit(0)
