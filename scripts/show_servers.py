"""Print what each server would be started with: python scripts/show_servers.py --configfile my.yaml."""

from shardmill import job
from shardmill.show_servers import describe_servers

if __name__ == "__main__":
    print(describe_servers(job.enter(globals().get("snakemake")).config), flush=True)
