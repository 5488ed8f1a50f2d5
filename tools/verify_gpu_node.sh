#!/usr/bin/env bash
# What only a real GPU node can show, in one go: about 15 minutes, most of them the model's download and first start.
#   tools/verify_gpu_node.sh [configs/qwen3.6-27b-1gpu.yaml]
# NOT YET RUN ON A GPU NODE: everything else in this repository was verified on CPU, with the unmodified SGLang server
# and, for speculation and state pools, with a stand-in that behaves as SGLang's source says. This script checks that:
#   1. the pinned environment builds and SGLang imports on this driver,
#   2. every server starts with the configuration's own flags and runs as many requests at once as asked for,
#   3. the thinking contract holds with the run's own sampling, and what one request alone reaches,
#   4. a small run ends with a proven dataset, and what speed its servers showed under load,
#   5. after a kill -9 of snakemake and all its jobs the same command goes on, and nothing is left on the GPUs at the end.
set -euo pipefail
config=${1:-configs/qwen3.6-27b-1gpu.yaml}
cd "$(dirname "$0")/.."
make env
python=.venv/bin/python
snakemake=.venv/bin/snakemake
folder=results/verify
mkdir -p "$folder"
"$python" tools/make_prompts.py 400 "$folder/prompts.jsonl"
run=("$snakemake" --cores 4 --configfile "$config" --config "run={\"name\":\"verify-node\"}"
    "prompts={\"path\":\"$folder/prompts.jsonl\"}" "shards={\"size\":100}")

say() { printf '\n== %s\n' "$*"; }

say "the machine"
nvidia-smi --query-gpu=index,name,memory.total,driver_version,clocks.max.sm --format=csv
df -h /dev/shm . | cat

say "what will be started"
"$python" scripts/show_servers.py --configfile "$config"

say "environment, model, servers, canary and the first shards; then kill -9 of snakemake and all its jobs"
setsid "${run[@]}" &
main=$!
until [ "$(cat results/verify-node/journals/*.jsonl 2>/dev/null | wc -l)" -ge 50 ]; do
    kill -0 "$main" 2>/dev/null || { echo "the run ended before 50 answers; see above"; exit 1; }
    sleep 2
done
nvidia-smi --query-gpu=index,utilization.gpu,memory.used,clocks.sm,power.draw --format=csv
kill -KILL -- "-$main"
echo "killed with $(cat results/verify-node/journals/*.jsonl | wc -l) answers on disk"

say "the same command again"
"${run[@]}"

say "what the servers were"
"$python" - <<'PY'
import json
manifest = json.load(open("results/verify-node/dataset/manifest.json"))
for server in manifest["engine"]["servers"]:
    facts = server["facts"]
    print("server", server["server"], server["engine"]["version"])
    for key in ("effective_max_running_requests", "max_running_requests", "context_length", "max_total_tokens",
                "speculative_algorithm", "kv_cache_dtype", "attention_backend", "lowered", "one_request_alone", "warnings"):
        print("   ", key, "=", facts.get(key))
print("counts:", manifest["counts"])
PY
grep -h "gen throughput" results/verify-node/logs/servers/*.engine.log | tail -5 || true

say "what is left on the GPUs (nothing of ours should be)"
sleep 15
nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv
