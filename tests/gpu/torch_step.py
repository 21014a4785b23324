"""PyTorch's time for a forward and backward pass of 784-h-h-10, batch 256: median ms, eager and as a CUDA graph, as JSON.

    torch_step.py H float32|tf32|bfloat16
"""
import json
import statistics
import sys

import torch

BATCH, WARM_UP, REPEATS = 256, 20, 200


def timed(step):
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)] for _ in range(2))
    for begin, end in zip(begins, ends):
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in zip(begins, ends))


def main():
    width, math = int(sys.argv[1]), sys.argv[2]
    torch.backends.cuda.matmul.allow_tf32 = math == "tf32"
    model = torch.nn.Sequential(
        torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10)).cuda()
    x = torch.rand(BATCH, 784, device="cuda")
    labels = torch.randint(10, (BATCH,), device="cuda")

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=math == "bfloat16", cache_enabled=False):
            loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    eager = timed(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(WARM_UP):
        graph.replay()
    print(json.dumps({"eager_ms": eager, "graph_ms": timed(graph.replay)}))


if __name__ == "__main__":
    main()
