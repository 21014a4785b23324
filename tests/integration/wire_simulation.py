"""What ps.proto says of elements of two bytes and of four bits, of error feedback and top-k, in NumPy: of one slice, in float32,
to the bit."""
import numpy as np

SLICE = 32768
WHOLE = 1024  # Slices of so many elements are sent whole.
BLOCK = 256  # Values that share a scale.


def e3m0_bytes(values):
    """Of each block its scale and its codes, two in a byte."""
    encoded = b""
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK]
        scale = np.float32(np.abs(block).max())
        if scale < np.float32(2.0**-119):
            scale = np.float32(0)
        half_way = scale * np.float32(0.70710677)
        levels = sum((np.abs(block) >= np.ldexp(half_way, level - 7)).astype(np.uint8) for level in range(1, 8))
        codes = np.where((levels == 0) | (scale == 0), 0, levels | (np.signbit(block) << 3)).astype(np.uint8)
        pairs = np.append(codes, np.zeros(len(codes) % 2, np.uint8)).reshape(-1, 2)
        encoded += scale.astype("<f4").tobytes() + (pairs[:, 0] | (pairs[:, 1] << 4)).astype(np.uint8).tobytes()
    return np.frombuffer(encoded, np.uint8)


def e3m0_values(encoded, elements):
    values, at = [], 0
    encoded = encoded.tobytes()
    while len(values) < elements:
        count = min(BLOCK, elements - len(values))
        scale = np.frombuffer(encoded, "<f4", 1, at)[0]
        pairs = encoded[at + 4 : at + 4 + (count + 1) // 2]
        at += 4 + len(pairs)
        for code in [half for pair in pairs for half in (pair & 15, pair >> 4)][:count]:
            size = np.ldexp(scale, (code & 7) - 7) if code & 7 else np.float32(0)
            values.append(-size if code & 8 else size)
    return np.array(values, np.float32)


def to_bits(values, kind):
    """The elements as they are sent; `kind` is float32, bfloat16, float16 or e3m0."""
    values = np.asarray(values, np.float32)
    if kind == "e3m0":
        return e3m0_bytes(values)
    if kind == "float32":
        return values.view(np.uint32)
    if kind == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bits(bits, kind):
    if kind == "float32":
        return bits.view(np.float32)
    if kind == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values, kind):
    if kind == "e3m0":
        return e3m0_values(to_bits(values, kind), len(values))
    return from_bits(to_bits(values, kind), kind)


def limited(values, kind):
    """Rounded; what is too large becomes the largest number of its sign."""
    most = {"float32": np.inf, "e3m0": np.inf, "bfloat16": float.fromhex("0x1.fep127"), "float16": 65504.0}[kind]
    return rounded(np.clip(values, np.float32(-most), np.float32(most)), kind)


class Compressor:
    """A worker's side of one slice."""

    def __init__(self, elements, kind, feedback=False, top_k=0, momentum=0.0, decay=1.0):
        self.kind, self.feedback, self.momentum = kind, feedback or top_k > 0, np.float32(momentum)
        self.decay = np.float32(decay)
        self.count = elements
        if top_k and elements > WHOLE:
            self.count = -(-top_k * elements // SLICE)
        self.kept = np.zeros(elements, np.float32)
        self.velocity = np.zeros(elements, np.float32)
        self.pending = None

    def push(self, values):
        """Positions (None: all) and the values at them, as they arrive."""
        velocity = self.momentum * self.velocity + values if self.momentum else np.array(values, np.float32)
        left = velocity + self.decay * self.kept if self.feedback else velocity.copy()
        if self.count == len(values):
            positions, sent = None, (limited if self.feedback else rounded)(left, self.kind).copy()
            left -= sent
        else:
            positions = np.sort(np.argsort(-np.abs(left), kind="stable")[:self.count])
            sent = limited(left[positions], self.kind)
            left[positions] -= sent
            velocity[positions] = 0
        self.pending = left, velocity
        return positions, sent

    def counts(self):
        """What was pushed last was applied."""
        left, self.velocity = self.pending
        if self.feedback:
            self.kept = left

    def dense(self, positions, sent):
        """What a server takes it for."""
        if positions is None:
            return sent
        values = np.zeros(len(self.kept), np.float32)
        values[positions] = sent
        return values


class Server:
    """SGD on one slice: g is the sum of c * g_r in ascending rank."""

    def __init__(self, weights, rate):
        self.weights, self.rate = np.array(weights, np.float32), np.float32(rate)

    def step(self, gradients, coefficients):
        total = np.float32(coefficients[0]) * gradients[0]
        for gradient, coefficient in zip(gradients[1:], coefficients[1:]):
            total = total + np.float32(coefficient) * gradient
        self.weights = self.weights - self.rate * total
