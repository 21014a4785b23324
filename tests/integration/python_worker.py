"""A worker in Python, on the generated stubs alone: fits y = w·x + b beside workers of any other language.

    python_worker.py HOST:PORT       with ps/v1/ps_pb2.py and ps/v1/ps_pb2_grpc.py on PYTHONPATH
"""
import random
import struct
import sys

import grpc
from ps.v1 import ps_pb2 as pb
from ps.v1 import ps_pb2_grpc as rpc

STEPS = 100
POINTS = 64
TIMEOUT_S = 120
SHAPES = [("w", 2), ("b", 1)]  # One slice each.


def make_points(seed):
    source = random.Random(seed)
    points = []
    for _ in range(POINTS):
        x = (source.uniform(-1, 1), source.uniform(-1, 1))
        points.append((x, 3 * x[0] - 2 * x[1] + 0.5))
    return points


def gradient(weights, points):
    """The mean squared error, and the gradient of its half, laid out like the weights."""
    result, loss = [0.0, 0.0, 0.0], 0.0
    for x, y in points:
        error = weights[0] * x[0] + weights[1] * x[1] + weights[2] - y
        loss += error * error / POINTS
        for i, factor in enumerate((x[0], x[1], 1.0)):
            result[i] += error * factor / POINTS
    return loss, result


def to_slices(values):
    return [pb.Slice(index=0, values=struct.pack("<2f", *values[:2])),
            pb.Slice(index=1, values=struct.pack("<1f", *values[2:]))]


class Worker:
    def __init__(self, server):
        self.chief = rpc.ChiefStub(grpc.insecure_channel(server))
        layout = pb.ModelLayout(tensors=[pb.Tensor(name=name, shape=[n]) for name, n in SHAPES])
        self.joined = self.chief.Join(pb.JoinRequest(protocol=1, job="default", name="python", layout=layout),
                                      timeout=TIMEOUT_S, wait_for_ready=True)
        self.id = self.joined.id
        # The chief is reached as the user said, the others as they advertise.
        self.shards = [(rpc.ShardStub(grpc.insecure_channel(server if shard.shard == 0 else shard.address)),
                        set(shard.slices)) for shard in self.joined.shards]

    def initialise(self):
        for stub, mine in self.shards:
            slices = [s for s in to_slices([0.0, 0.0, 0.0]) if s.index in mine]
            stub.Init(iter([pb.InitRequest(id=self.id, slices=slices)]), timeout=TIMEOUT_S)

    def take(self, replies, weights):
        """Copies pulled slices to `weights`; the version, and the answer to the push if there is one."""
        version, answer = None, None
        for reply in replies:
            version = reply.version
            if reply.HasField("push"):
                answer = reply.push.answer
            for piece in reply.slices:
                first = 0 if piece.index == 0 else 2
                values = struct.unpack(f"<{len(piece.values) // 4}f", piece.values)
                weights[first:first + len(values)] = values
        return version, answer

    def pull(self, weights):
        for stub, _ in self.shards:
            version, _ = self.take(stub.Pull(pb.PullRequest(id=self.id, wait_ms=20000), timeout=TIMEOUT_S), weights)
        return version

    def push_pull(self, step, version, values, weights):
        # All shards are asked before any is waited for: in bsp a version needs the push on each of them.
        calls = []
        for stub, mine in self.shards:
            request = pb.PushRequest(id=self.id, step=step, version=version, samples=POINTS, wait_ms=20000,
                                     slices=[s for s in to_slices(values) if s.index in mine])
            calls.append(stub.PushPull(iter([request]), timeout=TIMEOUT_S))
        for call in calls:
            version, answer = self.take(call, weights)
            assert answer == pb.ANSWER_APPLIED, f"step {step}: {pb.Answer.Name(answer)}"
        return version


def main():
    worker = Worker(sys.argv[1])
    if worker.joined.initialise:
        worker.initialise()
    weights = [0.0, 0.0, 0.0]
    version = worker.pull(weights)
    points = make_points(worker.id.rank)
    loss = None
    for step in range(worker.joined.start_step, STEPS):
        loss, values = gradient(weights, points)
        version = worker.push_pull(step, version, values, weights)
    assert worker.chief.Done(pb.DoneRequest(id=worker.id, wait_ms=20000), timeout=TIMEOUT_S).all_done
    print(f"rank {worker.id.rank}: version {version}, loss {loss:.3g}, w = {weights[0]:.4f} {weights[1]:.4f}, "
          f"b = {weights[2]:.4f}")
    worker.chief.Leave(pb.LeaveRequest(id=worker.id), timeout=TIMEOUT_S)


if __name__ == "__main__":
    main()
