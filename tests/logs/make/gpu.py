"""Real failures on one NVIDIA GPU, each in a process of its own with a bound: `gpu.py OUT.json` makes them all,
`gpu.py --step NAME` one of them, in this process.

OUT.json: {step: {"argv", "code", "seconds", "text", "gpus"}}. Sizes fit a card of about 140 GiB.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

GIB = 1 << 30


def _qkv(torch, length, heads=32, size=128, grad=False, seed=0):
    torch.manual_seed(seed)
    return [
        torch.randn(1, heads, length, size, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)
    ]


def dense_plain():
    """flex_attention that nobody compiled, at 32 heads and 49152 tokens."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = _qkv(torch, 49152)
    print("drafter: 32 heads, 49152 tokens, bf16", flush=True)
    flex_attention(query, key, value)


def dense_by_recompile_limit():
    """Compiled, but each batch has another length: beyond the limit every call is dense, without an error."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 2
    attend = torch.compile(flex_attention, dynamic=False)
    for step, length in enumerate((1024, 2048, 3072, 4096, 65536), start=1):
        out = attend(*_qkv(torch, length, heads=16, seed=step))
        torch.cuda.synchronize()
        print(f"step {step} length {length} mean {out.float().mean().item():.6f}", flush=True)


def dense_backward():
    """The forward pass fits as dense scores; the backward pass does not."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = _qkv(torch, 20480, heads=32, grad=True)
    out = flex_attention(query, key, value)
    print(f"forward done, {torch.cuda.max_memory_allocated() / GIB:.1f} GiB at most", flush=True)
    out.float().square().mean().backward()


def dense_while_running():
    """Dense at a size that fits: only the warning tells."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    for step in range(1, 13):
        out = flex_attention(*_qkv(torch, 8192, heads=8, grad=True, seed=step))
        out.float().mean().backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / GIB
        print(f"step {step}/100000 loss {8 / step:.4f} peak {peak:.2f} GiB", flush=True)


def mask_builder():
    """create_block_mask materialises the mask of every head."""
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b, h, q, k):
        return q >= k

    print("building the block mask for 98304 tokens", flush=True)
    create_block_mask(causal, 1, 32, 98304, 98304, device="cuda")


def oom_model():
    """A model that does not fit."""
    import torch

    layers = torch.nn.ModuleList()
    for index in range(200):
        layers.append(torch.nn.Linear(32768, 16384, bias=False, device="cuda", dtype=torch.bfloat16))
        if index % 40 == 0:
            print(f"layer {index}: {torch.cuda.memory_allocated() / GIB:.1f} GiB", flush=True)


def oom_activations():
    """Steps that fit, then a batch whose logits do not."""
    import torch

    head = torch.nn.Linear(4096, 151936, bias=False, device="cuda", dtype=torch.bfloat16)
    for step, rows in enumerate((4096, 8192, 16384, 131072), start=1):
        hidden = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        target = torch.randint(0, 151936, (rows,), device="cuda")
        loss = torch.nn.functional.cross_entropy(head(hidden).float(), target)
        loss.backward()
        print(f"step {step} rows {rows} loss {loss.item():.4f}", flush=True)


def _hold(gib):
    """Another program on the same card; returns once it holds its memory."""
    code = (
        "import sys, time, torch\n"
        f"kept = torch.empty({gib} << 30, dtype=torch.uint8, device='cuda')\n"
        "torch.cuda.synchronize(); print('held', flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    return other


def oom_other_process():
    """Somebody else's program holds most of the card."""
    other = _hold(110)
    print(f"another program holds memory, pid {other.pid}", flush=True)
    try:
        import torch

        torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
        torch.empty(48 * GIB, dtype=torch.uint8, device="cuda")
    finally:
        other.kill()


def oom_other_process_training():
    """The same in the middle of a step."""
    other = _hold(126)
    try:
        import torch

        net = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, device="cuda") for _ in range(8)))
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(1, 20):
            loss = net(torch.randn(4096 * step, 8192, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    finally:
        other.kill()


def _fragment(torch, pieces, whole, kept):
    """Live tensors that sit in the beginnings of larger, otherwise empty segments."""
    large = [torch.empty(whole, dtype=torch.uint8, device="cuda") for _ in range(pieces)]
    del large
    return [torch.empty(kept, dtype=torch.uint8, device="cuda") for _ in range(pieces)]


def oom_fragmented():
    import torch

    kept = _fragment(torch, 16, 8 * GIB, 4 * GIB + (1 << 21))
    print(f"{len(kept)} tensors kept; now one of 30 GiB", flush=True)
    torch.empty(30 * GIB, dtype=torch.uint8, device="cuda")


def oom_fragmented_smaller():
    import torch

    for step in range(1, 4):
        print(f"step {step} loss {2.0 / step:.3f}", flush=True)
    kept = _fragment(torch, 60, 2 * GIB, 1 * GIB + (1 << 21))
    buffers = [torch.empty(int(1.5 * GIB), dtype=torch.uint8, device="cuda") for _ in range(9)]
    print(f"{len(kept) + len(buffers)} buffers", flush=True)


def healthy_caught_oom():
    """An out-of-memory error that the program expects, catches and reports."""
    import torch

    rows = 1 << 37
    while True:
        try:
            batch = torch.empty(rows, dtype=torch.uint8, device="cuda")
            break
        except torch.OutOfMemoryError as error:
            print(f"WARNING: {type(error).__name__}: {str(error)[:80]}… halving the batch", flush=True)
            rows //= 2
    for step in range(1, 31):
        batch.fill_(step)
        print(f"step {step} loss {3.0 / step:.4f} tokens/s {20000 + step}", flush=True)
    print("training finished", flush=True)


def _flex_threads(torch, warm, seconds, threads=4):
    """Drafter workers as threads of one process, each with its own compiled flex_attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b, h, q, k):
        return q >= k

    mask = create_block_mask(causal, None, None, 256, 256, device="cuda")
    failed = threading.Event()
    done = threading.Event()
    start = threading.Barrier(threads)
    shared = torch.compile(flex_attention, fullgraph=True, dynamic=False) if warm else None

    def call(attend, heads):
        query, key, value = _qkv(torch, 256, heads=heads, size=64, grad=True)
        attend(query, key, value, block_mask=mask).float().sum().backward()

    if warm:
        call(shared, 2)

    def worker(index):
        attend = shared or torch.compile(flex_attention, fullgraph=True, dynamic=False)
        start.wait()
        step = 0
        try:
            while not done.is_set():
                call(attend, 2 if warm else 1 + index)
                step += 1
                if step % 50 == 0:
                    print(f"drafter {index} step {step}", flush=True)
        except BaseException:
            failed.set()
            raise

    workers = [threading.Thread(target=worker, args=(i,), name=f"drafter-{i}", daemon=True) for i in range(threads)]
    for thread in workers:
        thread.start()
    end = time.monotonic() + seconds
    fresh = _fresh_functions() if warm else iter(())
    while time.monotonic() < end and not failed.is_set():
        function = next(fresh, None)
        if function is None:
            time.sleep(0.1)
        else:
            torch.compile(function, backend="aot_eager")(torch.randn(8, device="cuda"))
    done.set()
    return failed.is_set()


def _fresh_functions(number=400):
    """Functions that were never compiled, from a real file, as a program with many small compiled parts has them."""
    import importlib.util

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parts.py"
        body = "def part{0}(x):\n    return torch.sin(x + {0}) * torch.cos(x) + {0}\n"
        path.write_text("import torch\n" + "".join(body.format(index) for index in range(number)))
        spec = importlib.util.spec_from_file_location("parts", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for index in range(number):
            yield getattr(module, f"part{index}")


def fx_race():
    """Workers call a compiled flex_attention while another thread compiles one."""
    import torch
    import torch._functorch.config

    torch._functorch.config.enable_autograd_cache = False
    if _flex_threads(torch, warm=True, seconds=30):
        time.sleep(0.5)
        raise SystemExit("a drafter worker has died")


def fx_race_make_fx():
    """Workers call a compiled function while another thread traces with make_fx; the main thread reports it."""
    import concurrent.futures

    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    net = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).cuda())
    rows = torch.randn(32, 64, device="cuda")
    net(rows).sum().backward()
    done = threading.Event()

    def worker(index):
        for step in range(1, 100_000):
            net(rows).sum().backward()
            if step % 500 == 0:
                print(f"worker {index} step {step}", flush=True)
            if done.is_set():
                return

    def export():
        while not done.is_set():
            make_fx(lambda x: torch.sin(x) * 2)(torch.randn(8))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(worker, index) for index in range(3)]
        pool.submit(export)
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        finally:
            done.set()


def deadlock():
    """First forward and backward passes of four threads on one card; the dump of all stacks comes after 40 s."""
    faulthandler.dump_traceback_later(40, exit=True)
    import torch
    import torch._functorch.config

    torch._functorch.config.enable_autograd_cache = False
    print("4 drafter threads, cold caches", flush=True)
    _flex_threads(torch, warm=False, seconds=120)


def device_assert():
    import torch

    table = torch.nn.Embedding(1000, 64).cuda()
    for step in range(1, 5):
        ids = torch.randint(0, 1000 if step < 4 else 5000, (256,), device="cuda")
        loss = table(ids).square().mean()
        print(f"step {step} loss {loss.item():.4f}", flush=True)


def device_assert_labels():
    import torch

    logits = torch.randn(64, 100, device="cuda", requires_grad=True)
    labels = torch.full((64,), 100, device="cuda")
    torch.nn.functional.cross_entropy(logits, labels).backward()
    torch.cuda.synchronize()


def _illegal(torch, offset):
    import triton
    import triton.language as tl

    @triton.jit
    def write(out, n, SIZE: tl.constexpr):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(out + at.to(tl.int64) * n, 1.0)

    write[(256,)](torch.empty(1024, device="cuda"), offset, SIZE=1024)


def illegal_access():
    import torch

    print("step 1 loss 0.7", flush=True)
    _illegal(torch, 1 << 30)
    torch.cuda.synchronize()


def illegal_access_late():
    """Seen only by a later, innocent call."""
    import torch

    net = torch.nn.Linear(512, 512, device="cuda")
    print(f"step 1 loss {net(torch.randn(8, 512, device='cuda')).mean().item():.4f}", flush=True)
    _illegal(torch, 1 << 31)
    for step in range(2, 6):
        print(f"step {step} loss {net(torch.randn(8, 512, device='cuda')).square().mean().item():.4f}", flush=True)


def _trap(torch):
    import triton
    import triton.language as tl

    @triton.jit
    def stop(out, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        value = tl.inline_asm_elementwise("trap; mov.u32 $0, 1;", "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(out + at, value)

    stop[(1,)](torch.empty(128, device="cuda", dtype=torch.int32), SIZE=128)


def launch_failure():
    import torch

    _trap(torch)
    torch.cuda.synchronize()


def launch_failure_in_step():
    import torch

    net = torch.nn.Linear(64, 64, device="cuda")
    for step in range(1, 4):
        loss = net(torch.randn(8, 64, device="cuda")).square().mean()
        if step == 3:
            _trap(torch)
        loss.backward()
        print(f"step {step} loss {loss.item():.4f}", flush=True)


def shared_memory():
    """One kernel wants more shared memory than a block may have."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def product(a, b, c, K, N: tl.constexpr, M: tl.constexpr, STEP: tl.constexpr):
        rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
        total = tl.zeros((M, N), dtype=tl.float32)
        for k in range(0, K, STEP):
            left = tl.load(a + rows[:, None] * K + (k + inner)[None, :])
            right = tl.load(b + (k + inner)[:, None] * N + columns[None, :])
            total = tl.dot(left, right, total)
        tl.store(c + rows[:, None] * N + columns[None, :], total)

    a = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16)
    product[(1,)](a, b, torch.empty(256, 256, device="cuda"), 4096, N=256, M=256, STEP=256, num_stages=4, num_warps=8)


def shared_memory_flex():
    """flex_attention with blocks that are too large for the card."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    attend = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    options = {"BLOCK_M": 128, "BLOCK_N": 256, "num_stages": 6}
    attend(*_qkv(torch, 4096, heads=4, size=256), kernel_options=options)
    torch.cuda.synchronize()


def triton_bad_kernel():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def broken(out, SIZE: tl.constexpr):
        left = tl.zeros((16, 16), dtype=tl.float32)
        right = tl.zeros((32, 16), dtype=tl.float32)
        tl.store(out + tl.arange(0, SIZE), tl.dot(left, right))

    broken[(1,)](torch.empty(256, device="cuda"), SIZE=256)


def triton_bad_assembly():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def broken(out, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        value = tl.inline_asm_elementwise("nonsense.u32 $0, $1;", "=r,r", [at], dtype=tl.int32, is_pure=True, pack=1)
        tl.store(out + at, value)

    broken[(1,)](torch.empty(128, device="cuda", dtype=torch.int32), SIZE=128)


def no_device():
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    torch.nn.Linear(4, 4).to("cuda")


def no_device_of_that_number():
    import torch

    rank = 5
    torch.cuda.set_device(rank)


_FOREIGN = """
#include <cstdio>
__global__ void nothing() {}
int main() {
  nothing<<<1, 1>>>();
  cudaError_t error = cudaDeviceSynchronize() ? cudaGetLastError() : cudaGetLastError();
  printf("CUDA error: %s\\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
"""


def no_kernel_image():
    """A program built for another generation of cards alone."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "foreign.cu"
        source.write_text(_FOREIGN)
        build = ["nvcc", "-gencode", "arch=compute_80,code=sm_80", "-o", f"{folder}/foreign", str(source)]
        # a cubin of the same major version would run: this one is of an older one, without PTX
        subprocess.run(build, check=True)
        raise SystemExit(subprocess.run([f"{folder}/foreign"], check=False).returncode)


def no_kernel_image_module():
    """The same through the driver's interface, as a library that brings its own kernels meets it."""
    import cupy

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "foreign.cu"
        source.write_text('extern "C" __global__ void nothing() {}\n')
        subprocess.run(["nvcc", "-cubin", "-arch=sm_80", "-o", f"{folder}/foreign.cubin", str(source)], check=True)
        cupy.RawModule(path=f"{folder}/foreign.cubin").get_function("nothing")((1,), (1,), ())


def nccl_same_card():
    """Two ranks on one card."""
    code = (
        "import os, torch, torch.distributed as d\n"
        "torch.cuda.set_device(0); d.init_process_group('nccl')\n"
        "d.all_reduce(torch.ones(1, device='cuda')); torch.cuda.synchronize()\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(code)
        argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29611"]
        raise SystemExit(subprocess.run([*argv, str(script)], check=False).returncode)


# those that need the card's memory to themselves run alone, the rest side by side
ALONE = (
    dense_plain,
    dense_by_recompile_limit,
    dense_backward,
    mask_builder,
    oom_model,
    oom_activations,
    oom_other_process,
    oom_other_process_training,
    oom_fragmented,
    oom_fragmented_smaller,
    healthy_caught_oom,
)
TOGETHER = (
    deadlock,
    fx_race,
    fx_race_make_fx,
    dense_while_running,
    device_assert,
    device_assert_labels,
    illegal_access,
    illegal_access_late,
    launch_failure,
    launch_failure_in_step,
    shared_memory,
    shared_memory_flex,
    triton_bad_kernel,
    triton_bad_assembly,
    no_device,
    no_device_of_that_number,
    no_kernel_image,
    no_kernel_image_module,
    nccl_same_card,
)


def _start(name, folder):
    cache = Path(folder) / f"cache-{name}"
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    env["TRITON_CACHE_DIR"] = str(cache / "triton")
    log = (Path(folder) / f"{name}.log").open("wb")
    argv = ["timeout", "-k", "5", "60", sys.executable, str(Path(__file__).resolve()), "--step", name]
    process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
    log.close()
    return process, time.monotonic()


def _gpus():
    words = "index,uuid,memory.used,memory.total,utilization.gpu,temperature.gpu,power.draw,name"
    argv = ["nvidia-smi", f"--query-gpu={words}", "--format=csv,noheader,nounits"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def make_all(out, only=()):
    made = {}
    with tempfile.TemporaryDirectory() as folder:

        def collect(name, process, began):
            code = process.wait()
            text = (Path(folder) / f"{name}.log").read_bytes().decode("utf-8", "replace")
            made[name] = {"code": code, "seconds": round(time.monotonic() - began, 1), "text": text, "gpus": _gpus()}
            Path(out).write_text(json.dumps(made))
            print(f"{name}: exit {code}, {made[name]['seconds']} s, {len(text)} bytes", flush=True)

        alone = [step.__name__ for step in ALONE if not only or step.__name__ in only]
        together = [step.__name__ for step in TOGETHER if not only or step.__name__ in only]
        for name in alone:
            collect(name, *_start(name, folder))
        for begin in range(0, len(together), 10):
            started = [(name, *_start(name, folder)) for name in together[begin : begin + 10]]
            for name, process, began in started:
                collect(name, process, began)


def main(argv):
    if argv[:1] == ["--step"]:
        warnings.simplefilter("default")
        steps = {step.__name__: step for step in (*ALONE, *TOGETHER)}
        steps[argv[1]]()
        return 0
    make_all(argv[0], argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
