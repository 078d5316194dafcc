"""Logits of a consolidated GPT, by PyTorch alone.

usage: logits.py FOLDER HEADS < tokens.json > logits.json

FOLDER is what `zero-ckpt consolidate CHECKPOINTS FOLDER` made, HEADS the number of attention heads, `tokens.json` rows of
tokens of one length. What is printed has a list of logits for each token of each row.
"""

import glob
import json
import sys

import torch
from safetensors.torch import load_file
from torch.nn.functional import embedding, gelu, layer_norm, linear, scaled_dot_product_attention


def logits(weights, heads, tokens):
    dim = weights["wte.weight"].shape[1]

    def norm(x, name):
        return layer_norm(x, (dim,), weights[f"{name}.gamma"], weights[f"{name}.beta"], 1e-5)

    def dense(x, name):
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    batch, sequence = tokens.shape
    x = embedding(tokens, weights["wte.weight"]) + weights["wpe.weight"][:sequence]
    for block in range(sum(name.endswith("qkv.weight") for name in weights)):
        name = f"blocks.{block}"
        parts = dense(norm(x, f"{name}.ln1"), f"{name}.qkv").chunk(3, dim=2)
        q, k, v = (part.view(batch, sequence, heads, dim // heads).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + dense(mixed.transpose(1, 2).reshape(batch, sequence, dim), f"{name}.proj")
        x = x + dense(gelu(dense(norm(x, f"{name}.ln2"), f"{name}.fc1")), f"{name}.fc2")
    x = norm(x, "lnf")
    return dense(x, "head") if "head.weight" in weights else linear(x, weights["wte.weight"])


if __name__ == "__main__":
    folder, heads = sys.argv[1], int(sys.argv[2])
    weights = {}
    for path in glob.glob(f"{folder}/*.safetensors"):
        weights |= load_file(path)
    tokens = torch.tensor(json.load(sys.stdin))
    with torch.no_grad():
        json.dump(logits(weights, heads, tokens).flatten(0, 1).tolist(), sys.stdout)
