"""One rank of the Gloo team of the `comm` benchmark, started by torchrun.

Takes orders from the address in the first argument, one per line: the operation, the size of the whole buffer
in bytes, how many times. Answers each with the seconds per operation. Ends with the connection.
"""

import socket
import sys
import time

import torch
import torch.distributed as dist

LARGEST = int(sys.argv[2])

dist.init_process_group("gloo")
world = dist.get_world_size()
torch.set_num_threads(1)
whole, result = torch.ones(LARGEST // 4), torch.ones(LARGEST // 4)
value = torch.ones(1, dtype=torch.float64)


def operation(name, size):
    if size == 8:
        return lambda: dist.all_reduce(value)
    elements = size // 4
    some, into = whole[:elements], result[:elements]
    return {
        "all_reduce": lambda: dist.all_reduce(some),
        "all_gather": lambda: dist.all_gather_into_tensor(into, some[: elements // world]),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(into[: elements // world], some),
    }[name]


host, port = sys.argv[1].rsplit(":", 1)
with socket.create_connection((host, int(port))) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lines = connection.makefile("rw")
    for order in lines:
        name, size, times = order.split()
        act = operation(name, int(size))
        act()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(int(times)):
            act()
        lines.write(f"{(time.perf_counter() - start) / int(times)}\n")
        lines.flush()

dist.destroy_process_group()
