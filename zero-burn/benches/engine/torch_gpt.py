"""Trains the benchmark's GPT with PyTorch, on the CPU and over Gloo, and prints tokens per second of all ranks.

Started by torchrun. Arguments: dim, layers, context, heads, rows per rank, steps, and `plain` (ranks that do not talk
while they train) or `fsdp` (FSDP2, each block and the rest sharded).
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

DIM, LAYERS, CONTEXT, HEADS, ROWS, STEPS = map(int, sys.argv[1:7])
MODE = sys.argv[7]
WARM_UP = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        batch, sequence, _ = x.shape
        heads = self.qkv(self.ln1(x)).view(batch, sequence, 3, HEADS, DIM // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, sequence, DIM))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Gpt()
    if MODE == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    seconds = []
    for _ in range(STEPS + WARM_UP):
        rows = torch.randint(0, 256, (ROWS, CONTEXT + 1))
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        logits = model(rows[:, :-1])
        F.cross_entropy(logits.reshape(-1, 256), rows[:, 1:].reshape(-1)).backward()
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        tokens = ROWS * CONTEXT * dist.get_world_size()
        print(tokens / statistics.median(seconds[WARM_UP:]), flush=True)
    dist.destroy_process_group()


main()
