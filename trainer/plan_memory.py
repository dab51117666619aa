"""Peak memory of a rank, by following its step tensor by tensor.

`Ledger` is told what comes and goes, in the order of step.py, drafter.py, head.py and optimizer.py run eagerly: an
operation's result is there before its arguments may go, what autograd keeps for the backward pass stays until the
operation that needs it has run, and a gradient takes its memory when it appears. Of fused kernels (flex attention, RMS
norms, the compiled head) inputs, outputs and what they keep count; temporaries within a few MB do not.

What is not counted: the CUDA context and libraries' workspaces, what the allocator holds beyond what is in use (a card
needs room for both, see plan_fit.py), and evaluation, whose size depends on the prompts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trainer.plan_sizes import Sizes


@dataclass
class Ledger:
    """Bytes in use, by kind and name; and what there was when they were most."""

    held: dict[tuple[str, str], int] = field(default_factory=dict)
    now: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)  # by kind
    when: str = ""  # the phase of the peak
    phase: str = ""

    def hold(self, kind: str, name: str, size: float) -> None:
        """Adds to what has this name. Raises nothing: sizes may be 0."""
        key = (kind, name)
        self.held[key] = self.held.get(key, 0) + int(size)
        self.now += int(size)
        if self.now > self.peak:
            self.peak, self.when, self.at_peak = self.now, self.phase, {}
            for (each, _), held in self.held.items():
                self.at_peak[each] = self.at_peak.get(each, 0) + held

    def drop(self, kind: str, *names: str) -> None:
        for name in names:
            self.now -= self.held.pop((kind, name))

    @contextmanager
    def passing(self, kind: str, size: float) -> Iterator[None]:
        """There within the block only."""
        self.hold(kind, "passing", size)
        yield
        self.held[(kind, "passing")] -= int(size)
        self.now -= int(size)

    def touch(self, kind: str, size: float) -> None:
        """There for a moment."""
        with self.passing(kind, size):
            pass


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What beside its sizes decides a rank's memory."""

    checkpointing: bool
    muon: bool
    average: bool
    parts: int  # of a step, at this rank
    draws: int  # anchor draws
    colocated: bool
    shards: int  # ranks that a drafter is spread over; 1: it is whole


def drafter_rank(sizes: Sizes, setting: Setting) -> Ledger:
    """A rank that trains. A target of unknown size, where it is here, counts as its ends alone."""
    ledger = Ledger()
    _at_rest(ledger, sizes, setting)
    if setting.colocated:
        ledger.phase = "check of the target"
        _check_of_target(ledger, sizes)
    ledger.phase = "start"
    _optimizer_state(ledger, sizes, setting)
    buffers = 0 if setting.colocated else 1 + (setting.parts if setting.draws > 1 else 1)
    ledger.hold("features", "buffers", buffers * sizes.feature_bytes)
    if setting.colocated:  # all parts of a step stay where further draws of anchors train on them
        ledger.hold("features", "of the parts", sizes.feature_bytes * (setting.parts if setting.draws > 1 else 1))
    for part in range(min(setting.parts, 2)):  # the second one meets the gradients of the first; further ones are alike
        if setting.colocated:
            ledger.phase = "target"
            ledger.touch("target", target_forward(sizes))
        _part(ledger, sizes, setting, first=part == 0)
    ledger.phase = "optimizer"
    _update(ledger, sizes, setting)
    return ledger


def target_rank(sizes: Sizes) -> Ledger:
    """A rank of `split` that holds the target: two buffers of features, one forward pass; before, the check."""
    ledger = Ledger(phase="check of the target")
    ledger.hold("target", "weights", (sizes.target.numbers or 0) * sizes.target_bytes)
    _check_of_target(ledger, sizes)
    ledger.phase = "target"
    ledger.hold("features", "buffers", 2 * sizes.feature_bytes)
    ledger.touch("target", target_forward(sizes) + sizes.distils * _width(sizes, sizes.tokens, sizes.target_bytes))
    return ledger


def _width(sizes: Sizes, rows: int, size: int) -> int:
    return rows * sizes.target.hidden * size


def target_forward(sizes: Sizes) -> int:
    """What a forward pass of a Llama-like target takes beside its weights and features, as transformers runs it: the
    embedded tokens, a layer's input and its stream, and the most of an MLP (normed, and three of its width), a norm
    (in float32, itself and its square) and that of all queries; and the rotations' cosines and sines."""
    target, e = sizes.target, sizes.target_bytes
    wide = 8 if e < 4 else e  # a float32 copy and its square, or the square alone
    queries = target.heads * target.head_size
    inner = max(
        (target.hidden + 3 * target.intermediate) * e,
        target.hidden * wide,
        queries * (e + wide),
    )
    return sizes.tokens * (3 * target.hidden * e + inner + 2 * target.head_size * e)


def _check_of_target(ledger: Ledger, sizes: Sizes) -> None:
    """`Target.check_isolation`: features of a part, of which two thirds are compared in float32, three and their
    difference."""
    features = sizes.tokens * sizes.features * sizes.target.hidden
    compared = 4 * sizes.rows * (sizes.length - max(1, sizes.length // 3)) * sizes.features * sizes.target.hidden
    ledger.touch("target", 2 * compared + features * sizes.target_bytes + target_forward(sizes))
    ledger.touch("target", 4 * compared)


def _at_rest(ledger: Ledger, sizes: Sizes, setting: Setting) -> None:
    target = sizes.vocabulary * sizes.target_bytes
    ledger.hold("target", "embedding, head and norm", target)
    if setting.colocated and sizes.target.numbers:
        ledger.hold("target", "other weights", sizes.target.numbers * sizes.target_bytes - target)
    if setting.shards == 1:
        ledger.hold("weights", "drafter", sizes.drafter * sizes.bytes)


def _optimizer_state(ledger: Ledger, sizes: Sizes, setting: Setting) -> None:
    own = 1 / setting.shards
    if setting.shards > 1 or sizes.bytes < sizes.wide:
        ledger.hold("masters", "drafter", own * sizes.drafter * sizes.wide)
    matrices = sizes.drafter - sizes.gains
    states = matrices + 2 * sizes.gains if setting.muon else 2 * sizes.drafter
    ledger.hold("optimizer", "states", own * states * sizes.wide)
    if setting.average:
        ledger.hold("average", "drafter", own * sizes.drafter * sizes.wide)


def _update(ledger: Ledger, sizes: Sizes, setting: Setting) -> None:
    """AdamW and clipping work in place. Muon takes a matrix at a time: its step, it normed, and what comes out, beside
    what came out for the one before, and four of [short side, short side]."""
    if setting.muon:
        rows, columns = max(sizes.matrices, key=lambda shape: shape[0] * shape[1])
        ledger.touch("optimizer", sizes.wide * (4 * rows * columns + 4 * min(rows, columns) ** 2))


def _gradient(ledger: Ledger, sizes: Sizes, setting: Setting, numbers: int, *, first: bool) -> None:
    """Of a parameter, in the computing dtype, then added to the master's or, sharded, summed over the ranks."""
    ledger.hold("gradients", "passing", numbers * sizes.bytes)
    if first and sizes.bytes < sizes.wide and setting.shards == 1:
        ledger.hold("gradients", "masters", numbers * sizes.wide)
    if setting.shards == 1 and sizes.bytes == sizes.wide:  # it is the master's
        ledger.hold("gradients", "masters", numbers * sizes.wide if first else 0)
    ledger.held[("gradients", "passing")] -= numbers * sizes.bytes
    ledger.now -= numbers * sizes.bytes


@contextmanager
def _gathered(ledger: Ledger, sizes: Sizes, setting: Setting, numbers: int) -> Iterator[None]:
    """Of a sharded drafter, a unit's weights while it computes, and the next ones on their way."""
    with ledger.passing("weights", 2 * numbers * sizes.bytes if setting.shards > 1 else 0):
        yield


def _part(ledger: Ledger, sizes: Sizes, setting: Setting, *, first: bool) -> None:
    """One micro-batch: forward, head, backward."""
    e, s, t = sizes.bytes, sizes.tokens, sizes.slots
    h = sizes.target.hidden
    ledger.phase = "forward"
    root = sizes.drafter - sizes.layers * (sizes.layer_matrices + 2 * (h + sizes.target.head_size))
    if setting.shards > 1:
        ledger.hold("weights", "root", root * e)
    ledger.hold("activations", "batch", 25 * s + 9 * sizes.rows * sizes.blocks + 44 * sizes.entries + _mask(sizes))
    ledger.hold("activations", "rotations", (s + t) * sizes.target.head_size * e)
    if sizes.target_bytes != e:
        ledger.hold("features", "converted", s * sizes.features * h * e)
    ledger.hold("activations", "fc", s * (h * e + 4))
    ledger.hold("activations", "fused", s * h * e)
    ledger.hold("activations", "stream 0", t * h * e)
    layer = sizes.layer_matrices
    for number in range(sizes.layers):
        with _gathered(ledger, sizes, setting, layer):
            _layer_forward(ledger, sizes, setting, number)
            ledger.hold("activations", f"stream {number + 1}", t * h * e)
            if setting.checkpointing:
                _forget(ledger, number)
    ledger.hold("activations", "out", t * (h * e + 4))
    _head(ledger, sizes)
    ledger.drop("activations", "out")

    ledger.phase = "backward"
    ledger.hold("activations", "scaled", sizes.entries * h * e)
    ledger.hold("activations", "grad", t * h * e)  # of the drafter's output, then of each stream in turn
    ledger.drop("head", "gradient")
    ledger.drop("activations", "scaled")
    ledger.touch("activations", t * h * e)
    ledger.drop("activations", f"stream {sizes.layers}")
    ledger.hold("activations", "grad of fused", 0)
    for number in reversed(range(sizes.layers)):
        with _gathered(ledger, sizes, setting, layer):
            if setting.checkpointing:
                _layer_forward(ledger, sizes, setting, number, again=True)
            _layer_backward(ledger, sizes, setting, number, first=first)
            if setting.shards > 1:  # its gradients: as they came, in the masters' dtype, and this rank's rows
                ledger.touch("gradients", layer * (e + sizes.wide))
                ledger.hold("gradients", "rows", layer * sizes.wide / setting.shards if first else 0)
    ledger.hold("activations", "grad of fc", s * h * e)
    ledger.drop("activations", "grad of fused", "fused")
    _gradient(ledger, sizes, setting, root, first=first)
    if setting.shards > 1:
        ledger.touch("gradients", root * (e + sizes.wide))
        ledger.hold("gradients", "rows", root * sizes.wide / setting.shards if first else 0)
        ledger.drop("weights", "root")
    ledger.drop("activations", "grad of fc", "fc", "grad", "batch", "rotations")
    if sizes.target_bytes != e:
        ledger.drop("features", "converted")


def _mask(sizes: Sizes) -> int:
    """Lists of tiles, by query and by key, full and partial; and four bounds a query. Once for each kind of layer."""
    queries, keys = sizes.blocks * sizes.block, sizes.length + sizes.blocks * sizes.block
    tiles = (queries // 128 + 1) * (keys // 128 + 1)
    return len(set(sizes.windows)) * sizes.rows * (4 * 4 * tiles + 16 * queries)


def _inside(sizes: Sizes) -> dict[str, int]:
    """What a layer keeps for its backward pass, beside the stream that enters it, in order."""
    e, s, t = sizes.bytes, sizes.tokens, sizes.slots
    h, i, q, c = sizes.target.hidden, sizes.intermediate, sizes.query_width, sizes.key_width
    return {
        "normed": t * (h * e + 4),
        "context key": s * (c * e + 4 * sizes.kv_heads),
        "query": t * (q * e + 4 * sizes.heads),
        "key": t * (c * e + 4 * sizes.kv_heads),
        "rotated query": t * q * e,
        "all keys": (s + t) * c * e,
        "all values": (s + t) * c * e,
        "mixed": t * (q * e + 4 * sizes.heads),  # flex attention's output and the logarithms of its sums
        "joined": t * q * e,  # its heads side by side
        "middle": t * h * e,  # the stream between attention and MLP
        "normed middle": t * (h * e + 4),
        "gate": t * i * e,
        "silu": t * i * e,
        "up": t * i * e,
        "product": t * i * e,
    }


def _layer_forward(ledger: Ledger, sizes: Sizes, setting: Setting, number: int, *, again: bool = False) -> None:
    """`again`: in the backward pass, where it ends with the last tensor that is needed."""
    e, s, t, c = sizes.bytes, sizes.tokens, sizes.slots, sizes.key_width
    with ledger.passing("activations", 2 * s * c * e):  # keys and values of the context, until the layer returns
        for name, size in _inside(sizes).items():
            ledger.hold("activations", f"{number} {name}", size)
            if name == "rotated query":
                ledger.touch("activations", 2 * t * sizes.query_width * e)
        if not again:
            ledger.touch("activations", 2 * t * sizes.target.hidden * e)


def _forget(ledger: Ledger, number: int) -> None:
    for kind, name in list(ledger.held):
        if kind == "activations" and name.startswith(f"{number} "):
            ledger.drop(kind, name)


def _head(ledger: Ledger, sizes: Sizes) -> None:
    """A chunk's logits, the target's where they are compared, and the gradient of the logits; of all entries the
    states and their gradient."""
    e, h, v = sizes.bytes, sizes.target.hidden, sizes.target.vocabulary
    ledger.phase = "loss"
    ledger.hold("head", "states", sizes.entries * h * e)
    ledger.hold("head", "gradient", sizes.entries * h * e)
    if sizes.target_bytes != e:
        ledger.hold("head", "converted", v * h * e)
    ledger.hold("head", "figures", 16 * sizes.entries)
    with ledger.passing("head", (1 + sizes.distils) * sizes.chunk * v * e):
        ledger.touch("head", sizes.chunk * v * e)
    ledger.drop("head", "states")


def _layer_backward(ledger: Ledger, sizes: Sizes, setting: Setting, number: int, *, first: bool) -> None:
    e, s, t = sizes.bytes, sizes.tokens, sizes.slots
    h, i, q, c = sizes.target.hidden, sizes.intermediate, sizes.query_width, sizes.key_width

    def gone(*names: str) -> None:
        ledger.drop("activations", *(f"{number} {name}" for name in names))

    def came(name: str, size: int) -> None:
        ledger.hold("activations", f"{number} {name}", size)

    def weight(numbers: int) -> None:
        _gradient(ledger, sizes, setting, numbers, first=first)

    # the MLP, from its output to its norm
    came("g product", t * i * e)
    weight(h * i)
    gone("product")
    came("g silu", t * i * e)
    came("g up", t * i * e)
    gone("silu", "up", "g product")
    came("g normed", t * h * e)
    weight(h * i)
    gone("g up")
    came("g gate", t * i * e)
    gone("gate", "g silu")
    with ledger.passing("activations", t * h * e):
        weight(h * i)
    gone("g gate", "normed middle")
    ledger.touch("activations", t * h * e)
    gone("g normed", "middle")
    # attention: its output projection, the kernel, rotations and norms of queries and keys, projections
    came("g joined", t * q * e)
    weight(h * q)
    gone("joined")
    came("g mixed", t * (q * e + 4 * sizes.heads))
    came("g query", t * q * e)
    came("g keys", 2 * (s + t) * c * e)
    gone("rotated query", "all keys", "all values", "mixed", "g joined", "g mixed")
    ledger.touch("activations", 3 * t * c * e)
    ledger.touch("activations", 2 * t * q * e)
    gone("key", "query")
    came("g normed", t * h * e)
    for numbers in (h * q, h * c, h * c):
        with ledger.passing("activations", t * h * e):
            weight(numbers)
    gone("g query")
    # of the context: keys' norm and rotation, and the sum over layers and projections of the fused features' gradient
    ledger.touch("activations", 3 * s * c * e)
    if not ledger.held[("activations", "grad of fused")]:
        ledger.hold("activations", "grad of fused", s * h * e)
    ledger.touch("activations", s * h * e)
    gone("context key", "g keys")
    ledger.touch("activations", t * h * e)
    gone("normed", "g normed")
    ledger.drop("activations", f"stream {number}")
