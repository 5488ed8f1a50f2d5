"""Say what a run will take: tokens, time, money, room."""

from shardmill import job
from shardmill.economics.forecast import make_forecast
from shardmill.economics.show import describe
from shardmill.planning import make_plan

if __name__ == "__main__":
    config = job.enter(globals().get("snakemake")).config
    print(describe(config, make_forecast(make_plan(config.model_dump()))))
