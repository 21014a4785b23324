"""The model as a file at any time: export_test.py BUILD_FOLDER CASE."""

import json
import re
import struct
import subprocess
import sys

from job import BIN, MODEL, Job, Program, wait_until

MODELS = MODEL[:2]  # Data set and network.


def tensors(path):
    """Metadata, shapes and bytes of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    values = data[8 + size :]
    return metadata, {name: (entry["shape"], values[slice(*entry["data_offsets"])]) for name, entry in header.items()}


def evaluate(weights):
    done = subprocess.run(
        [str(BIN / "ps_worker"), "--eval_only", f"--init_weights={weights}", *MODELS],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def model():
    """What is exported, from a checkpoint or the servers, is what the job evaluates, and a job can begin with it."""
    steps = 100
    with Job("bsp", 2, steps=steps, worker_flags=["--experiment_step_time=40ms"]) as job:
        save = job.folder / "saved.safetensors"
        job.worker_flags.append(f"--save_weights={save}")
        job.start_workers()
        wait_until("training", lambda: job.version() > 10)
        running = job.folder / "running.safetensors"
        done = job.ask("export", f"--output={running}")
        assert done.returncode == 0, done.stderr
        version = int(re.search(r"version (\d+) of job default", done.stdout)[1])
        assert tensors(running)[0]["version"] == str(version)
        late = job.ask("export", f"--output={running}", "--version=1")
        assert late.returncode == 1 and "version 1 of shard" in late.stderr, late.stderr
        job.finish()

        stored = job.folder / "stored.safetensors"
        done = export([f"--from={job.dir}", f"--output={stored}"])
        assert f"version {steps} of checkpoint {job.dir}/checkpoint-" in done.stdout, done.stdout
        assert tensors(stored)[1] == tensors(save)[1]
        told = job.workers[0].out.read_text().split("weights hash")[0]
        assert evaluate(stored) == told and evaluate(job.dir) == told, (evaluate(stored), told)

        for weights in (stored, job.dir):
            with Job("bsp", 1, steps=1, worker_flags=[f"--init_weights={weights}"]) as new:
                new.start_workers()
                new.finish()
                first = new.folder / "first.safetensors"
                done = export([f"--from={new.dir}/checkpoint-000001", f"--output={first}"])
                assert "version 0 of checkpoint" in done.stdout, done.stderr
                assert tensors(first)[1] == tensors(stored)[1]


def predicted():
    """What a network says of each sample, in the units of the targets, is what its loss is made of."""
    with Job("bsp", 1) as job:
        csv = job.folder / "points.csv"
        csv.write_text("".join(f"{x / 10},{300 + 7 * x}\n" for x in range(1201)))
        network = [f"--dataset=csv:{csv},task=regression", "--model=mlp:1,8,1", "--loss=mse", "--batch_size=64"]
        weights, output = job.folder / "model.safetensors", job.folder / "out.csv"
        trained = [*network, "--epochs=2", f"--save_weights={weights}", f"--server={job.addresses[0]}"]
        workers = [
            Program(job.folder, f"worker-{rank}", [str(BIN / "ps_worker"), *trained, f"--rank={rank}"])
            for rank in range(job.num_workers)
        ]
        assert [worker.end() for worker in workers] == [0, 0], workers[0].errors()
        command = [str(BIN / "ps_worker"), f"--init_weights={weights}", f"--predict={output}", *network[:3]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        header, *lines = output.read_text().splitlines()
        assert header == "target,output", header
        rows = [tuple(map(float, line.split(","))) for line in lines]
        assert len(rows) == 1201
        assert all(abs(target - (300 + 7 * x)) < 0.01 for x, (target, _) in enumerate(rows))
        loss = sum((target - said) ** 2 for target, said in rows) / len(rows)
        told = float(re.search(r"test loss: (\S+)", done.stdout)[1])
        assert abs(loss - told) < 1e-4 * told, (loss, told)

        # Without labels the same is said, and nothing is evaluated.
        unlabelled = job.folder / "unlabelled.csv"
        unlabelled.write_text("".join(f"{x / 10}\n" for x in range(1201)))
        both = [f"--dataset=csv:{csv},{unlabelled},task=regression", *network[1:3]]
        done = subprocess.run([*command[:3], *both], capture_output=True, text=True, timeout=60, check=True)
        assert "test loss" not in done.stdout, done.stdout
        header, *lines = output.read_text().splitlines()
        assert header == "output" and list(map(float, lines)) == [said for _, said in rows], lines[:3]

        bad = subprocess.run(
            [*command[:2], "--predict=/proc/x", *network[:3]], capture_output=True, text=True, check=False
        )
        assert bad.returncode == 1 and "--predict=/proc/x" in bad.stderr, bad.stderr
        bad = subprocess.run([*command[:1], *command[2:]], capture_output=True, text=True, check=False)
        assert bad.returncode == 2 and "--predict: expected --init_weights" in bad.stderr, bad.stderr


def of_the_model():
    """Scaling and labels are those of the file of weights, whatever data it is given; what contradicts is refused."""
    rows = [(label, 100 + 10 * k + 0.1 * i) for i in range(60) for k, label in enumerate((10, 20, 30))]
    with Job("bsp", 1) as job:

        def write(name, some):
            path = job.folder / name
            path.write_text("".join(f"{label} 1:{x} 2:{-x / 7}\n" for label, x in some))
            return f"--dataset=libsvm:{path}"

        train, without_20 = write("train.svm", rows), write("test.svm", [row for row in rows if row[0] != 20])
        network, weights = "--model=mlp:2,16,4", job.folder / "model.safetensors"
        training = ["--batch_size=20", "--epochs=40", "--activation=tanh", f"--save_weights={weights}"]
        trained = [train, network, *training, f"--server={job.addresses[0]}"]
        workers = [
            Program(job.folder, f"worker-{rank}", [str(BIN / "ps_worker"), *trained, f"--rank={rank}"])
            for rank in range(job.num_workers)
        ]
        assert [worker.end() for worker in workers] == [0, 0], workers[0].errors()
        assert "classes 0 to 2 are the labels 10, 20, 30" in workers[0].errors(), workers[0].errors()

        def ask(data, *flags, file=weights):
            command = [str(BIN / "ps_worker"), f"--init_weights={file}", data, network, *flags]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

        def predict(data):
            output = job.folder / "out.csv"
            done = ask(data, f"--predict={output}")
            assert done.returncode == 0, done.stderr
            header, *lines = output.read_text().splitlines()
            assert header == "label,output_10,output_20,output_30,unused_3", header
            return [tuple(map(float, line.split(","))) for line in lines]

        said = predict(train)
        assert {row[0] for row in said} == {10, 20, 30}, said[:3]
        # In a file with other means, and other ranks of its labels, each sample gets the same outputs.
        again = predict(without_20)
        assert len(again) == 120
        for expected, row in zip([row for row in said if row[0] != 20], again, strict=False):
            assert row[0] == expected[0], (expected, row)
            assert all(abs(a - b) < 1e-3 for a, b in zip(expected, row, strict=False)), (expected, row)

        bad = ask(train, "--eval_only", "--normalize=minmax")
        assert bad.returncode == 1 and "--normalize=minmax: " in bad.stderr and "standard" in bad.stderr, bad.stderr
        assert ask(train, "--eval_only", "--normalize=standard").stdout == ask(train, "--eval_only").stdout
        assert "does not say" not in ask(train, "--eval_only").stderr
        # So is what the network computes.
        told = ask(train, "--eval_only")
        assert "was trained with --activation=tanh: so it is taken here" in told.stderr, told.stderr
        in_training = workers[0].out.read_text().split("weights hash")[0]
        assert told.stdout == in_training, (told.stdout, in_training)
        assert ask(train, "--eval_only", "--activation=tanh").stdout == told.stdout
        for flag, stored in (
            ("--activation=relu", "--activation=tanh"),
            ("--loss=mse", "--loss=softmax_cross_entropy"),
        ):
            bad = ask(train, "--eval_only", flag)
            assert bad.returncode == 1, bad.stderr
            assert f"{flag}: " in bad.stderr and f"was trained with {stored}" in bad.stderr, bad.stderr

        # Training may go on with other data, with a warning of each thing that is otherwise.
        with Job("bsp", 1) as other:
            flags = [f"--init_weights={weights}", f"--server={other.addresses[0]}", "--steps=1"]
            started = [
                Program(other.folder, f"other-{rank}", [str(BIN / "ps_worker"), without_20, network, *flags])
                for rank in range(other.num_workers)
            ]
            assert [worker.end() for worker in started] == [0, 0], started[0].errors()
            for words in (
                "was trained on the labels 10, 20, 30; its outputs are now taken for the labels 10, 30",
                "were scaled in another way",
                "--activation=relu: ",
            ):
                assert words in started[0].errors(), (words, started[0].errors())
        plain = job.folder / "plain.safetensors"
        data = weights.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        del header["__metadata__"]
        text = json.dumps(header).encode()
        plain.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        told = ask(train, "--eval_only", file=plain)
        assert told.returncode == 0 and "does not say how the data were scaled" in told.stderr, told.stderr
        assert "does not say which labels" in told.stderr, told.stderr


def refused():
    """A damaged checkpoint, one that is not there, and a file that cannot be written are each named in one line."""
    with Job("bsp", 2, steps=20) as job:
        job.start_workers()
        job.finish()
        newest = max(job.dir.glob("checkpoint-*/manifest.json")).parent
        values = newest / "shard-1-of-2.safetensors"
        damaged = bytearray(values.read_bytes())
        damaged[8 + struct.unpack("<Q", damaged[:8])[0]] ^= 1  # The first byte of its first tensor.
        values.write_bytes(damaged)
        output = job.folder / "model.safetensors"
        for arguments, status, named in [
            ([f"--from={newest}", f"--output={output}"], 1, str(values)),
            ([f"--from={job.folder}/none", f"--output={output}"], 1, "none"),
            ([f"--from={newest}", "--output=/proc/model"], 1, "--output=/proc/model"),
            ([f"--from={job.dir}", f"--output={job.dir}/generation"], 1, "is in --from"),
            ([f"--from={newest}", f"--output={newest}/shard-0-of-2.safetensors"], 1, "is in --from"),
            ([f"--from={newest}"], 2, "--output"),
        ]:
            done = job.ask("export", *arguments) if status == 2 else export(arguments)
            assert done.returncode == status and named in done.stderr, (arguments, done.stderr)
            assert len(done.stderr.splitlines()) == 1 or status == 2, done.stderr
        assert not output.exists()
        # In a folder of checkpoints the one before is taken, and what is skipped is named.
        done = export([f"--from={job.dir}", f"--output={output}"])
        assert done.returncode == 0 and str(values) in done.stderr, done.stderr
        assert newest.name not in done.stdout and "of checkpoint" in done.stdout, done.stdout
        assert output.exists()
        evaluated = subprocess.run(
            [str(BIN / "ps_worker"), "--eval_only", f"--init_weights={job.dir}", *MODELS],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert str(values) in evaluated.stderr, evaluated.stderr
        assert evaluated.stdout == evaluate(output), evaluated.stdout


def export(arguments):
    command = [str(BIN / "ps_ctl"), "export", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


if __name__ == "__main__":
    {"model": model, "of_the_model": of_the_model, "predicted": predicted, "refused": refused}[sys.argv[2]]()
