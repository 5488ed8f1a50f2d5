"""Measure how many requests at once the servers should run."""

from shardmill import job
from shardmill.calibrate import Calibration
from shardmill.economics.show import describe_calibration

if __name__ == "__main__":
    config = job.enter(globals().get("snakemake")).config
    calibration = Calibration(config)
    job.stop_on_signals(calibration.stop)
    print(describe_calibration(calibration.run()))
