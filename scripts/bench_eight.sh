#!/usr/bin/env bash
# Measures zerojax on all GPUs of this machine, and beside it torchtitan 0.2.2 and DeepSpeed 0.19.8, one after the other.
#
#   PEERS=folder SITE=folder bash scripts/bench_eight.sh FOLDER PART...
#
# A part is one or more rows; `8b` `8b-again` `lean` `1b` `1b-again` `stages` `host` are ours, the last two with other settings, and
# `titan-8b` `titan-8b-full` `titan-1b` `deepspeed-8b` are the peers'. With fp8 and nothing offloaded or recomputed: `8b-rich` (bf16),
# `8b-fp8`, `8b-fp8-again` and `titan-8b-float8` (tensorwise scales, fp8 gathers). `8b-offload` and `8b-fp8-offload` offload one matmul of 28
# layers. All parts of a FOLDER share a compilation cache, so `8b` starts cold and `8b-again` warm. PEERS holds peer_titan.py and peer_ds.py,
# whose settings docs/benchmarks/raw/peers_4xh200.txt states; SITE holds the peers' own packages. LIMIT_S (default 570): no part starts later
# than that, and ours end by then; PART_S (default: LIMIT_S) bounds each of ours. The rows of a part are printed when it ends.
#
#   PEERS=folder SITE=folder LIMIT_S=460 PART_S=150 bash scripts/bench_eight.sh FOLDER 8b-fp8 titan-8b-float8 8b-rich 8b-fp8-again
set -uo pipefail
cd "$(dirname "$0")/.."
folder=$1 && shift
mkdir -p "$folder"
export NCCL_NVLS_ENABLE=0 JAX_COMPILATION_CACHE_DIR=$folder/cache
export XLA_FLAGS="--xla_gpu_experimental_use_collective_kernels= ${XLA_FLAGS:-}"
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
limit=${LIMIT_S:-570}

ours() { # NAME WORDS...: one or more runs of bench_train
  local name=$1 left=$((limit - SECONDS)) && shift
  local most=${PART_S:-$left}
  rm -rf "$folder/$name"
  python3 scripts/bench_train.py --processes "$gpus" --steps 12 --limit_s $((most < left ? most : left)) --workdir "$folder/$name" "$@" >"$folder/$name.out" 2>&1
  local status=$?
  rm -f "$folder/$name/"*.lock
  return $status
}
figures() { # NAME: the rows of a part
  local out=$folder/$1.out
  grep -hE "^\||tps: |RESULT|planned|first step" "$out" | sed "s,\x1b\[[0-9;]*m,,g" | tail -12 || true
  grep -qE "^\||tps: |RESULT" "$out" || tail -5 "$out"
}
float8=(--model.converters quantize.linear.float8 --quantize.linear.float8.enable_fsdp_float8_all_gather
  --quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp --quantize.linear.float8.filter_fqns output)
peer() { # NAME SECONDS SCRIPT WORDS...
  local name=$1 most=$2 script=$3 && shift 3
  PYTHONPATH=${SITE:-} PYTORCH_ALLOC_CONF=expandable_segments:True timeout "$most" python3 -m torch.distributed.run --nproc_per_node="$gpus" \
    --local-ranks-filter 0 --role rank --tee 3 "$PEERS/$script" "$@" >"$folder/$name.out" 2>&1
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader >"$folder/gpus.txt"
for part in "$@"; do
  if [ $((limit - SECONDS)) -lt 30 ]; then echo "$part: not started, $SECONDS s are over"; continue; fi
  began=$SECONDS
  case $part in
    8b | 8b-again) ours "$part" --settings 8b ;;
    8b-rich | 8b-offload | 8b-fp8 | 8b-fp8-offload) ours "$part" --settings "$part" ;;
    8b-fp8-again) ours "$part" --settings 8b-fp8 ;;
    1b | 1b-again) ours "$part" --settings 1b ;;
    lean) ours "$part" --settings 8b-lean ;;
    stages) ours "$part" --settings 1b-stage1 1b-stage2-lean 1b-accum4 ;;
    host) ours "$part" --run "8b-host: configs/llama3_8b.py offload.optimizer=host" ;;
    titan-8b) peer "$part" 150 peer_titan.py 8B 2 8192 selective 15 ;;
    titan-8b-float8) peer "$part" 180 peer_titan.py 8B 2 8192 selective 15 "${float8[@]}" ;;
    titan-8b-full) peer "$part" 150 peer_titan.py 8B 2 8192 full 15 ;;
    titan-1b) peer "$part" 120 peer_titan.py 1B 8 4096 selective 15 ;;
    deepspeed-8b) peer "$part" 150 peer_ds.py --model 8b --bs 2 --seq 8192 --stage 3 --steps 5 ;;
    *) echo "unknown part: $part" && exit 2 ;;
  esac
  echo "== $part: status $?, $((SECONDS - began)) s"
  figures "$part"
done
