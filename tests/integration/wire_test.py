"""Jobs whose pushes and weights have elements of two bytes or four bits, or only the largest, whose workers are generated stubs and NumPy:
at every step the servers' weights are, to the bit, those of a simulation of what ps.proto says.

    wire_test.py BUILD_FOLDER

Skipped (a line that begins with SKIPPED:) where what it needs is not there.
"""
import pathlib
import subprocess
import sys
import tempfile

try:
    import grpc
    import numpy as np
    from google.protobuf import descriptor  # noqa: F401
except ImportError as error:
    print(f"SKIPPED: {error}")
    sys.exit(0)

from wire_simulation import SLICE, Compressor, Server, e3m0_bytes, from_bits, rounded, to_bits

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
STEPS = 8
RATE = 0.5
RANKS = 2
SHARDS = 2
LAYOUT = [("w", SLICE + 5000), ("b", 10)]
SIZES = [SLICE, 5000, 10]  # Of its slices.
SAMPLES = [3, 5]
COEFFICIENTS = [np.float32(np.float64(n) / sum(SAMPLES)) for n in SAMPLES]

CASES = [
    (["--wire_dtype=bfloat16"], {"kind": "bfloat16"}, "float32"),
    (["--wire_dtype=float16", "--weights_wire_dtype=float16"], {"kind": "float16"}, "float16"),
    (["--wire_dtype=bfloat16", "--error_feedback", "--weights_wire_dtype=bfloat16"],
     {"kind": "bfloat16", "feedback": True}, "bfloat16"),
    (["--compress=topk:0.01"], {"kind": "float32", "top_k": 328}, "float32"),
    (["--compress=topk:0.01", "--weights_delta", "--weights_wire_dtype=float16"], {"kind": "float32", "top_k": 328}, "float16"),
    (["--compress=topk:0.02", "--wire_dtype=bfloat16", "--momentum_correction=0.9"],
     {"kind": "bfloat16", "top_k": 655, "momentum": 0.9}, "float32"),
    (["--wire_dtype=e3m0", "--weights_wire_dtype=bfloat16"], {"kind": "e3m0"}, "bfloat16"),
    (["--wire_dtype=e3m0", "--error_feedback", "--error_feedback_decay=0.95"], {"kind": "e3m0", "feedback": True, "decay": 0.95},
     "float32"),
    (["--compress=topk:0.01", "--wire_dtype=e3m0"], {"kind": "e3m0", "top_k": 328}, "float32"),
]


def make_stubs(folder):
    plugin = subprocess.run(["which", "grpc_python_plugin"], check=True, capture_output=True, text=True).stdout.strip()
    proto = ROOT / "proto"
    subprocess.run(["protoc", f"--proto_path={proto}", f"--python_out={folder}", f"--grpc_out={folder}",
                    f"--plugin=protoc-gen-grpc={plugin}", str(proto / "ps/v1/ps.proto")], check=True, timeout=TIMEOUT_S)
    sys.path.insert(0, str(folder))


def start_servers(build, flags):
    processes, chief = [], ""
    for shard in range(SHARDS):
        command = [str(build / "bin/ps_server"), f"--num_workers={RANKS}", f"--num_shards={SHARDS}", f"--shard={shard}",
                   f"--learning_rate={RATE}", "--optimizer=sgd", "--lease=60s", *flags]
        processes.append(subprocess.Popen(command + ([f"--chief={chief}"] if chief else []), stdout=subprocess.PIPE,
                                          stderr=subprocess.DEVNULL, text=True))
        address = processes[-1].stdout.readline().removeprefix("listening on ").strip()
        chief = chief or address
    return processes, chief


class Worker:
    """A rank, which knows of the job what its join was told."""

    def __init__(self, pb, rpc, chief, rank):
        self.pb, self.rank = pb, rank
        self.weights, self.received = {}, 0
        self.chief = rpc.ChiefStub(grpc.insecure_channel(chief))
        layout = pb.ModelLayout(tensors=[pb.Tensor(name=name, shape=[n]) for name, n in LAYOUT])
        self.joined = self.chief.Join(pb.JoinRequest(protocol=1, job="default", rank=rank, layout=layout,
                                                      features=["error_feedback_decay"]), timeout=TIMEOUT_S,
                                      wait_for_ready=True)
        self.id = self.joined.id
        self.shards = [(rpc.ShardStub(grpc.insecure_channel(shard.address)), list(shard.slices))
                       for shard in self.joined.shards]

    def initialise(self, values):
        for stub, mine in self.shards:
            slices = [self.pb.Slice(index=i, values=values[i].tobytes()) for i in mine]
            stub.Init(iter([self.pb.InitRequest(id=self.id, slices=slices)]), timeout=TIMEOUT_S)

    def slice_of(self, index, positions, sent, kind):
        message = self.pb.Slice(index=index, values=to_bits(sent, kind).tobytes(), type=self.joined.wire_type)
        if positions is not None:
            message.positions = positions.astype("<u2").tobytes()
        return message

    def push_pull(self, step, slices):
        """A call to each shard, which is answered when the others' are there."""
        calls = []
        for stub, mine in self.shards:
            # What was pulled last is whole, and of the version that the gradient was computed on.
            base = {"base": step} if self.joined.weights_delta else {}
            request = self.pb.PushRequest(id=self.id, step=step, version=step, samples=SAMPLES[self.rank], wait_ms=20000,
                                          slices=[slices[i] for i in mine], **base)
            calls.append(stub.PushPull(iter([request]), timeout=TIMEOUT_S))
        return calls

    def pull(self, **options):
        return [stub.Pull(self.pb.PullRequest(id=self.id, wait_ms=20000, **options), timeout=TIMEOUT_S)
                for stub, _ in self.shards]

    def weights_of(self, calls, kind):
        """By slice, of replies whose elements must be of this kind; what is not in them is as it was."""
        for call in calls:
            for reply in call:
                if reply.HasField("push"):
                    assert reply.push.answer == self.pb.ANSWER_APPLIED, reply.push
                for piece in reply.slices:
                    self.received += len(piece.values) + len(piece.positions)
                    if piece.absent:
                        continue
                    assert piece.type == self.pb.WireType.Value(f"WIRE_{kind.upper()}"), (piece.index, piece.type)
                    width = np.uint32 if kind == "float32" else np.uint16
                    values = from_bits(np.frombuffer(piece.values, width), kind)
                    if piece.positions:
                        self.weights[piece.index][np.frombuffer(piece.positions, "<u2")] = values
                    else:
                        assert len(values) == SIZES[piece.index]
                        self.weights[piece.index] = values.copy()
        return [self.weights[i] for i in range(len(SIZES))]


def refused(worker, message, said):
    """A push of this slice alone is INVALID_ARGUMENT, for a reason that says this."""
    stub = worker.shards[0][0]
    request = worker.pb.PushRequest(id=worker.id, step=0, version=0, samples=1, wait_ms=1000, slices=[message])
    try:
        stub.Push(iter([request]), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and said in error.details(), error.details()
    else:
        raise AssertionError(f"not refused: {said}")


def infinite(elements, kind):
    """A slice whose first element is infinite, the others 0; of four bits its first scale."""
    infinity = {"float32": b"\0\0\x80\x7f", "bfloat16": b"\x80\x7f", "float16": b"\0\x7c", "e3m0": b"\0\0\x80\x7f"}[kind]
    return infinity + to_bits(np.zeros(elements), kind).tobytes()[len(infinity):]


def check_refusals(worker, options):
    """Of slices whose form is another than the job's."""
    pb, mine = worker.pb, worker.shards[0][1]
    index = next(i for i in mine if SIZES[i] > 1024)
    n, sparse = SIZES[index], options.get("top_k", 0) > 0
    other = pb.WIRE_FLOAT16 if options["kind"] != "float16" else pb.WIRE_BFLOAT16
    refused(worker, pb.Slice(index=index, values=bytes(2 * n), type=other), "its elements are")
    refused(worker, pb.Slice(index=index, values=bytes(2 * n), type=77), "unknown type")
    width = {"float32": 4, "e3m0": 5}.get(options["kind"], 2)  # Of a slice of one element.
    kind = worker.joined.wire_type
    one = {"index": index, "values": bytes(width), "type": kind}

    def zeros(count):
        return to_bits(np.zeros(count), options["kind"]).tobytes()

    if not sparse:
        refused(worker, pb.Slice(**one, positions=b"\0\0"), "it has positions")
        if options["kind"] == "e3m0":
            refused(worker, pb.Slice(index=index, values=bytes(3), type=kind), "no blocks of e3m0")
            refused(worker, pb.Slice(index=index, values=bytes(len(e3m0_bytes(np.zeros(n - 2)))), type=kind), "bytes, expected")
        refused(worker, pb.Slice(index=index, values=infinite(n, options["kind"]), type=kind), "not finite")
        return
    refused(worker, pb.Slice(index=index, values=zeros(n), type=kind), "0 positions; expected 1 to")
    refused(worker, pb.Slice(**one, positions=b"\0"), "bytes of positions for")
    three = np.arange(3, dtype="<u2").tobytes()
    refused(worker, pb.Slice(**one, positions=three), "bytes of positions for")
    refused(worker, pb.Slice(index=index, values=zeros(2), type=kind, positions=b"\5\0\5\0"), "do not ascend")
    refused(worker, pb.Slice(index=index, absent=True, type=kind, positions=b"\5\0"), "though it is absent")
    refused(worker, pb.Slice(**one, positions=int(n - 1 + (n < 65535)).to_bytes(2, "little")), f"it has {n} elements")
    many = np.arange(2000, dtype="<u2")
    refused(worker, pb.Slice(index=index, values=zeros(2000), type=kind, positions=many.tobytes()), "expected 1 to")
    refused(worker, pb.Slice(index=index, values=infinite(1, options["kind"]), type=kind, positions=b"\0\0"), "not finite")


def run_case(pb, rpc, build, flags, options, weights_kind):
    random = np.random.default_rng(5)
    initial = [random.normal(size=n).astype(np.float32) for n in SIZES]
    processes, chief = start_servers(build, flags)
    try:
        workers = [Worker(pb, rpc, chief, rank) for rank in range(RANKS)]
        workers[0].initialise(initial)
        servers = [Server(values, RATE) for values in initial]
        compressors = [[Compressor(n, **options) for n in SIZES] for _ in range(RANKS)]
        for worker in workers:
            begin = worker.weights_of(worker.pull(version=0), weights_kind)
            assert all((a == rounded(b, weights_kind)).all() for a, b in zip(begin, initial))
        check_refusals(workers[1], options)
        for step in range(STEPS):
            calls, arrived = [], [[] for _ in SIZES]
            for worker, mine in zip(workers, compressors):
                slices = []
                for index, compressor in enumerate(mine):
                    sent = compressor.push(random.normal(scale=0.1, size=SIZES[index]).astype(np.float32))
                    slices.append(worker.slice_of(index, *sent, options["kind"]))
                    arrived[index].append(compressor.dense(*sent))
                calls.append(worker.push_pull(step, slices))
            for server, gradients in zip(servers, arrived):
                server.step(gradients, COEFFICIENTS)
            for worker, call, mine in zip(workers, calls, compressors):
                pulled = worker.weights_of(call, weights_kind)
                for index, server in enumerate(servers):
                    expected = rounded(server.weights, weights_kind)
                    assert (pulled[index] == expected).all(), f"{flags}: step {step}, slice {index} differs"
                for compressor in mine:
                    compressor.counts()
        if workers[0].joined.weights_delta:
            whole = 2 * sum(SIZES)
            # All at first, and after the first update.
            assert workers[1].received < 2 * whole + STEPS * whole / 10, f"{workers[1].received} bytes of weights"
            # One that says that it has a version of which nothing is known gets all, and so does who is no member: a
            # version of this number may be another generation's.
            worker = Worker.__new__(Worker)
            worker.__dict__.update(workers[1].__dict__, weights={}, received=0)
            worker.weights_of(worker.pull(base=12345), weights_kind)
            assert worker.received == whole, worker.received
            worker.received, worker.id = 0, pb.Identity()
            worker.weights_of(worker.pull(base=STEPS - 1), weights_kind)
            assert worker.received == whole, worker.received
        kept = workers[0].weights_of(workers[0].pull(float32=True), "float32")
        assert all((a == b.weights).all() for a, b in zip(kept, servers)), f"{flags}: the servers' own weights differ"
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def main():
    build = pathlib.Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        make_stubs(folder)
        from ps.v1 import ps_pb2, ps_pb2_grpc
        for case in CASES:
            run_case(ps_pb2, ps_pb2_grpc, build, *case)
            print("ok", *case[0])


if __name__ == "__main__":
    main()
