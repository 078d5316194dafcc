"""A peer of the `offload` benchmark: AdamW on the CPU by PyTorch (fused) or DeepSpeed.

Arguments: `torch` or `deepspeed`, elements, threads. Takes tasks from standard input, one per line, and answers each with
the seconds of a step:

- `f32`: parameters, gradient and states in f32.
- `bf16`: masters and states in f32, the gradient comes in bf16, the new parameters go out in bf16.
- `bf16-only`: DeepSpeed's update of bf16 parameters that have no masters.
- `whole-f32`, `whole-bf16`: a gradient (f32 or bf16) times a loss scale is unscaled and clipped by its norm before the
  update, and parameters go out in bf16.
"""

import sys
import time

peer, elements, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def answer(text):
    print(f"answer {text}", flush=True)


try:
    import torch

    if peer == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam
except Exception as error:
    answer(repr(error).splitlines()[0])
    sys.exit()

torch.set_num_threads(threads)
LR, DECAY, SCALE, CLIP = 1e-3, 0.01, 1024.0, 1.0


def optimizer_of(parameter):
    if peer == "torch":
        return torch.optim.AdamW([parameter], lr=LR, weight_decay=DECAY, fused=True)
    return DeepSpeedCPUAdam([parameter], lr=LR, weight_decay=DECAY, adamw_mode=True)


master = torch.nn.Parameter(torch.randn(elements))
master.grad = torch.randn(elements)
single = torch.randn(elements) * SCALE
half = single.bfloat16()
copy = torch.empty(elements, dtype=torch.bfloat16)
optimizer = optimizer_of(master)
bf16_only = []


def step_bf16_only():
    if not bf16_only:
        parameter = torch.nn.Parameter(copy.clone())
        parameter.grad = half
        bf16_only.append(optimizer_of(parameter))
    bf16_only[0].step()


@torch.no_grad()
def write_copy():
    copy.copy_(master)


@torch.no_grad()
def unscale_and_clip():
    if peer == "torch":
        master.grad.mul_(1 / SCALE)
        torch.nn.utils.clip_grad_norm_([master], CLIP)
    else:
        # As DeepSpeed does: one factor for both.
        norm = torch.linalg.vector_norm(master.grad).item() / SCALE
        master.grad.mul_(1 / (SCALE * max(norm / CLIP, 1.0)))


def step_f32():
    optimizer.step()


@torch.no_grad()
def take_gradient(gradient):
    master.grad.copy_(gradient)


def step_bf16():
    take_gradient(half)
    optimizer.step()
    write_copy()


def step_whole_f32():
    unscale_and_clip()
    optimizer.step()
    write_copy()


def step_whole_bf16():
    take_gradient(half)
    unscale_and_clip()
    optimizer.step()
    write_copy()


STEPS = {
    "f32": step_f32,
    "bf16": step_bf16,
    "bf16-only": step_bf16_only,
    "whole-f32": step_whole_f32,
    "whole-bf16": step_whole_bf16,
}

answer("ready")
for line in sys.stdin:
    task = line.strip()
    step = STEPS[task]
    times = []
    for at in range(3):
        if task == "whole-f32":
            # The step scales it in place.
            take_gradient(single)
        start = time.perf_counter()
        step()
        if at > 0:
            times.append(time.perf_counter() - start)
    answer(sum(times) / len(times))
