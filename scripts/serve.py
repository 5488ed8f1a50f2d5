"""Start one server under its supervisor, and wait until it has answered a real request."""

from shardmill import job
from shardmill.errors import UserError
from shardmill.files import read_json, write_json
from shardmill.launch import start_server
from shardmill.may_fail import go_on_without
from shardmill.model.staging import entry_path

if __name__ == "__main__":
    current = job.enter(globals().get("snakemake"), "server")
    config, name = current.config, current.wildcards.server
    digest = read_json(config.layout.model_manifest)["digest"]
    try:
        start_server(config, name, entry_path(config), digest)
    except UserError as error:
        go_on_without(config, name, error)
    else:
        write_json(config.layout.server_info(name), read_json(config.layout.ready(name)))
