# ruff: noqa
"""Peers for generation on Llama shapes: transformers with a static cache, and DeepSpeed-Inference.

Usage: peer_generate.py [--shape 8B|debug] [--variants NAME,NAME] [--batch 1] [--large_batch 128] [--tokens_in 1024] [--tokens_out 256]
[--runs 3] [--limit_s 240] [--each_s 120] [--ways 1|2]. Weights are random (one seed, bf16, built on the GPU), so it downloads nothing.

Each variant runs in a process of its own with its own time limit, and prints one JSON line: decoded tokens/s, ms a step, ms to the first
token (medians of the runs), the error against transformers without a cache, versions; or the reason why it did not run. Greedy, no stop
token. The fastest that ran is then measured with --large_batch. With --ways 2 the DeepSpeed variants without kernels run on two GPUs.

The variants (a number of tokens/s is of decode: the steps after the first token; nothing is read back between the steps of a `loop`):
- transformers_loop: StaticCache, torch.compile(mode="reduce-overhead") of the step, a loop of ours.
- transformers_generate: the same by `generate`, which compiles the step itself.
- deepspeed: init_inference without injection, `engine.generate`. One GPU: transformers as it is. Two: AutoTP.
- deepspeed_static: the same with a StaticCache, where `generate` compiles the step (one GPU or two).
- deepspeed_graph: enable_cuda_graph. `engine.generate` never enters `engine.forward`, which holds the graph, so a loop of ours calls
  `engine.forward` for each step, on a StaticCache. Prompts go to `engine.module`.
- deepspeed_kernels: replace_with_kernel_inject as it is. The container of Llama does not pass on the number of key-value heads: an error is expected.
- deepspeed_kernels_kv: the same, told `num_kv` by three lines below. The layers are called by a loop of ours, since they hold
  their own cache and return another type than transformers 5 expects.
- deepspeed_kernels_mha: the same layers as they are, on a Llama with as many key-value heads as heads (1.6 GB more weights at 8B).
DeepSpeed refuses enable_cuda_graph together with kernels for Llama. In bf16 `init_inference` rounds the rotary frequencies with the weights
(0.31 and 0.45 of the largest logit after 1,024 tokens of `debug`); they are put back here, so that the errors are of kernels and graphs.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback

SHAPES = {
    "8B": dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
    ),
    "debug": dict(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        vocab_size=512,
        initializer_range=0.1,
    ),
}
ONE_WAY = "transformers_loop,deepspeed_graph,deepspeed_kernels_kv,deepspeed,transformers_generate,deepspeed_kernels_mha,deepspeed_kernels,deepspeed_static"
TWO_WAYS = "deepspeed,deepspeed_static"
TAG = "PEER_RESULT "
LARGE_BATCH_S = 75  # of the limit, kept for the large batch

parser = argparse.ArgumentParser()
parser.add_argument("--shape", default="8B", choices=SHAPES)
parser.add_argument("--variants", default="")
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--large_batch", type=int, default=128, help="0: no large batch")
parser.add_argument("--tokens_in", type=int, default=1024)
parser.add_argument("--tokens_out", type=int, default=256)
parser.add_argument("--runs", type=int, default=3)
parser.add_argument("--limit_s", type=float, default=240, help="of the whole script")
parser.add_argument("--each_s", type=float, default=120, help="of one variant")
parser.add_argument("--ways", type=int, default=1)
parser.add_argument("--only", default="", help="run this variant in this process")
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()


def main():
    start, results = time.monotonic(), {}
    for name in (args.variants or (TWO_WAYS if args.ways > 1 else ONE_WAY)).split(","):
        results[name] = run_variant(name, args.batch, start, keep_s=LARGE_BATCH_S if args.large_batch else 0)
    ranked = sorted((n for n, r in results.items() if "error" not in r), key=lambda n: -results[n]["tokens_per_s"])
    for name in ranked if args.large_batch else ():
        if "error" not in run_variant(name, args.large_batch, start):
            break


def run_variant(name, batch, start, keep_s=0):
    """Runs one variant in processes of their own, prints its line and returns it. `keep_s` of the limit is left for what follows."""
    left = min(args.each_s, args.limit_s - (time.monotonic() - start) - keep_s)
    line = {"variant": name, "batch": batch, "ways": args.ways}
    if left < 15:
        line["error"] = "not started: limit_s is used up"
        print(json.dumps(line), flush=True)
        return line
    command = [sys.executable]
    if args.ways > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ways}"]
    command += [os.path.abspath(__file__), "--only", name, "--batch", str(batch)]
    for key in ("shape", "tokens_in", "tokens_out", "runs", "ways"):
        command += [f"--{key}", str(getattr(args, key))]
    began = time.monotonic()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, _ = child.communicate(timeout=left)
        late = False
    except subprocess.TimeoutExpired:
        output, late = stop(child), True
    found = [x for x in output.splitlines() if x.startswith(TAG)]
    if found:
        line.update(json.loads(found[-1][len(TAG) :]))
    if "error" not in line and (late or not found):
        line["error"] = f"stopped after {left:.0f} s" if late else f"exit {child.returncode}"
    if "error" in line and not found:
        line["output_tail"] = output[-1500:]
    line["process_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(line), flush=True)
    return line


def stop(child):
    """Ends a late process and returns what it had printed. torch.distributed.run ends its workers, which have sessions of their own, on SIGTERM."""
    child.terminate()
    try:
        return child.communicate(timeout=15)[0]
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
    try:
        return child.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:
        return ""  # a process it left holds the pipe


def child_main(name):
    import torch

    rank = int(os.environ.get("RANK", 0))
    try:
        line = measure(name)
    except BaseException as error:  # deepspeed leaves by exit() where shapes differ
        line = {"error": f"{type(error).__name__}: {error}"[:600], "trace": traceback.format_exc()[-1500:]}
    if rank == 0:
        print("\n" + TAG + json.dumps(line), flush=True)
    if torch.distributed.is_initialized() and "error" not in line:
        torch.distributed.destroy_process_group()
    sys.exit(1 if "error" in line else 0)


def measure(name):
    import torch
    import transformers

    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    model = build_model(device, heads_alike=name == "deepspeed_kernels_mha")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (args.batch, args.tokens_in), generator=generator).to(device)
    with torch.no_grad():
        # the last two rows of logits of the first sequence, without a cache
        reference = model(ids[:1], use_cache=False, logits_to_keep=2).logits[0].float()
        clock = time.perf_counter()
        runner = VARIANTS[name](model, ids)
        line = check_loop(runner, ids, reference) if len(runner) == 2 else {}
        time_once = time_loop if len(runner) == 2 else time_generate
        for _ in range(2):  # compiles, captures and fills the allocator
            time_once(runner, ids, args.tokens_out, sync)
        warm_s = time.perf_counter() - clock
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        firsts, steps = [], []
        for _ in range(args.runs):
            first_s, decode_s, tokens = time_once(runner, ids, args.tokens_out, sync)
            firsts.append(first_s * 1e3)
            steps.append(decode_s * 1e3 / (args.tokens_out - 1))
    if tokens.shape != (args.batch, args.tokens_out):
        raise RuntimeError(f"expected {(args.batch, args.tokens_out)} tokens, found {tuple(tokens.shape)}")
    step_ms = statistics.median(steps)
    line |= {
        "shape": args.shape,
        "batch": args.batch,
        "tokens_in": args.tokens_in,
        "tokens_out": args.tokens_out,
        "tokens_per_s": round(args.batch * 1e3 / step_ms, 2),
        "ms_per_step": round(step_ms, 4),
        "first_token_ms": round(statistics.median(firsts), 3),
        "runs_ms_per_step": [round(x, 4) for x in steps],
        "runs_first_token_ms": [round(x, 3) for x in firsts],
        "warm_s": round(warm_s, 1),
        "first_token_as_reference": bool(tokens[0, 0] == reference[-1].argmax()),
        "tokens": tokens[0, :8].tolist(),
        "weights_gb": round(sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9, 3),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    if "deepspeed" in sys.modules:
        line["versions"]["deepspeed"] = sys.modules["deepspeed"].__version__
    if device.type == "cuda":
        line |= {
            "device": torch.cuda.get_device_name(),
            # of PyTorch's allocator alone: the kernels' workspace comes on top
            "peak_allocated_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
            "used_gb": round((torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / 1e9, 2),
        }
    return line


def build_model(device, heads_alike=False):
    import torch
    import transformers

    shape = dict(SHAPES[args.shape])
    if heads_alike:
        shape["num_key_value_heads"] = shape["num_attention_heads"]
    config = transformers.LlamaConfig(
        **shape,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


# A runner is (prefill, step), each from int64[batch, length] to logits [batch, vocab], or (generate,), from ids and a number to tokens.


def check_loop(runner, ids, reference):
    """Compares a prompt less one token, and then a step with that token, with the reference; relative to its largest logit."""
    prefill, step = runner
    error = lambda logits, row: round(((logits[0].float() - row).abs().max() / row.abs().max()).item(), 5)
    return {
        "error_prefill": error(prefill(ids[:, :-1]), reference[0]),
        "error_step": error(step(ids[:, -1:]), reference[1]),
    }


def time_loop(runner, ids, count, sync):
    import torch

    prefill, step = runner
    sync()
    start = time.perf_counter()
    token = prefill(ids).argmax(-1, keepdim=True)
    sync()
    first = time.perf_counter()
    tokens = [token]
    for _ in range(count - 1):
        token = step(token).argmax(-1, keepdim=True)
        tokens.append(token)
    sync()
    return first - start, time.perf_counter() - first, torch.cat(tokens, 1)


def time_generate(runner, ids, count, sync):
    """The first token is a `generate` of one token; the steps are what `count` tokens take beyond it."""
    (generate,) = runner
    seconds = []
    for n in (1, count):
        sync()
        start = time.perf_counter()
        tokens = generate(ids, n)
        sync()
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1] - seconds[0], tokens


def transformers_loop(model, ids):
    import torch

    return static_loop(
        model,
        ids,
        model,
        torch.compile(model.__call__, mode="reduce-overhead", fullgraph=True),
        torch.compiler.cudagraph_mark_step_begin,
    )


def static_loop(model, ids, forward, forward_step, before_step=lambda: None):
    import torch
    import transformers

    length = args.tokens_in + args.tokens_out + 8
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    position = torch.zeros(1, 1, dtype=torch.int64, device=ids.device)
    columns = torch.arange(length, device=ids.device)

    def prefill(ids):
        cache.reset()
        position.fill_(ids.shape[1] - 1)
        return forward(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    def step(token):
        position.add_(1)
        mask = (columns <= position).expand(token.shape[0], 1, 1, length).contiguous()
        before_step()
        # every tensor is new or fixed: DeepSpeed and inductor keep the first one as the graph's own buffer
        inputs = dict(input_ids=token, attention_mask=mask, position_ids=position.clone())
        return forward_step(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    return prefill, step


def transformers_generate(model, ids):
    return (generate_static(model, model, fullgraph=True),)


def generate_static(model, engine, fullgraph):
    import torch
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=args.tokens_in + args.tokens_out + 8)
    compile_config = transformers.CompileConfig(mode="reduce-overhead", fullgraph=fullgraph)
    compile_config._compile_all_devices = True

    def generate(ids, n):
        cache.reset()
        out = engine.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=n,
            do_sample=False,
            compile_config=compile_config,
        )
        return out[:, ids.shape[1] :]

    return generate


def init_inference(model, **more):
    import torch
    import deepspeed

    tokens = args.tokens_in + args.tokens_out + 8
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    engine = deepspeed.init_inference(
        model, dtype=torch.bfloat16, max_out_tokens=tokens, tensor_parallel={"tp_size": args.ways}, **more
    )
    rotary.inv_freq = frequencies.to(rotary.inv_freq.device)  # it rounds them to bf16 with the weights
    return engine


def deepspeed_alone(model, ids):
    import torch

    engine = init_inference(model)

    def generate(ids, n):
        out = engine.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
        return out[:, ids.shape[1] :]

    return (generate,)


def deepspeed_static(model, ids):
    return (generate_static(model, init_inference(model), fullgraph=False),)


def deepspeed_graph(model, ids):
    engine = init_inference(model, enable_cuda_graph=True)
    prefill, step = static_loop(model, ids, engine.module, engine)
    # The first step runs the module three times and captures it; the cache counts its tokens on the device, so it has moved on.
    prefill(ids[:, :-1])
    step(ids[:, -1:])
    return prefill, step


def deepspeed_kernels(model, ids):
    import torch

    engine = init_inference(model, replace_with_kernel_inject=True, return_tuple=False)
    inner = engine.module.model
    if ids.device.type == "cuda":
        torch.cuda.empty_cache()  # the kernels' workspace is sized by what is free

    def forward(ids):
        x = inner.embed_tokens(ids)
        for layer in inner.layers:
            x = layer(x)
        return engine.module.lm_head(inner.norm(x[:, -1:]))[:, -1]

    return forward, forward  # a prompt longer than one token starts the kernels' own cache afresh


def deepspeed_kernels_kv(model, ids):
    from deepspeed.module_inject.containers.llama import DS_LLAMAContainer

    stock = DS_LLAMAContainer.create_module

    def create_module(self, config=None):
        (self.ds_model_config if config is None else config).num_kv = model.config.num_key_value_heads
        return stock(self, config)

    DS_LLAMAContainer.create_module = create_module
    return deepspeed_kernels(model, ids)


VARIANTS = {
    "transformers_loop": transformers_loop,
    "transformers_generate": transformers_generate,
    "deepspeed": deepspeed_alone,
    "deepspeed_static": deepspeed_static,
    "deepspeed_graph": deepspeed_graph,
    "deepspeed_kernels": deepspeed_kernels,
    "deepspeed_kernels_kv": deepspeed_kernels_kv,
    "deepspeed_kernels_mha": deepspeed_kernels,
}

if __name__ == "__main__":
    child_main(args.only) if args.only else main()
