"""Start one server under its supervisor, and wait until it has answered a real request."""

from shardmill import job
from shardmill.files import read_json, write_json
from shardmill.launch import start_server
from shardmill.model.staging import entry_path

if __name__ == "__main__":
    current = job.enter(globals().get("snakemake"), "server")
    config, name = current.config, current.wildcards.server
    digest = read_json(config.layout.model_manifest)["digest"]
    start_server(config, name, entry_path(config), digest)
    ready = read_json(config.layout.ready(name))
    write_json(config.layout.server_info(name), ready)
