"""Records runs of PyTorch's SGD and Adagrad in float64, for `torch_optimizers.json` beside it.

    python torch_optimizers.py > torch_optimizers.json

`adamw.json` was recorded in the same way from Adam and AdamW.
"""

import json

import torch

CASES = [
    ("SGD", {"lr": 0.03}),
    ("SGD", {"lr": 0.03, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.02, "momentum": 0.9}),
    ("SGD", {"lr": 0.02, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.05}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-6}),
    ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.5, "eps": 1e-8}),
]

torch.manual_seed(0)
runs = []
for name, options in CASES:
    parameter = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = getattr(torch.optim, name)([parameter], **options)
    run = {"name": name, "options": options, "init": parameter.tolist(), "grads": [], "params": []}
    for _ in range(8):
        parameter.grad = torch.randn(5, dtype=torch.float64)
        run["grads"].append(parameter.grad.tolist())
        optimizer.step()
        run["params"].append(parameter.tolist())
    runs.append(run)
print(json.dumps(runs))
