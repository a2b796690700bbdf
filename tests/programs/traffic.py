"""What a captured step must read, write and multiply, counted from its trace; no GPU is needed.

    PYTHONPATH=src:tests:. python -m programs.traffic --model text --batch 512
    PYTHONPATH=src:tests:. python -m programs.traffic --model vit --batch 256 --kernels --largest 20

The program that a GPU compiles is traced with tensors that hold nothing, at its true size, beside a plain step of the batch.
Chains of elementwise operations are taken as the compiler takes them: computed where they are read, stored only where a
product, a result or too many operands ask for it; reductions that walk the same tensor share the walk. So the bytes are those
of a good compiler, and the milliseconds are a floor: bytes at 4.0 TB/s or operations at 600 TFLOP/s (60 in fp32), whichever
is longer, kernel by kernel. Launches cost nothing here. θ, noise and update are not in the count.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from benchmarks.step import batch_of, build
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

BANDWIDTH, PRODUCTS, FP32_PRODUCTS = 4.0e12, 600e12, 60e12
FUSED_READS = 4  # a chain of elementwise operations that reads more large tensors than this is stored
VIEWS = {
    "view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice",
    "select", "split", "split_with_sizes", "unbind", "getitem", "detach", "alias", "as_strided", "unflatten", "chunk",
    "lift_fresh_copy",
}  # fmt: skip
#: What ends a chain of elementwise operations, in the same kernel.
REDUCTIONS = {
    "sum", "mean", "amax", "amin", "any", "var_mean", "var", "prod", "linalg_vector_norm", "native_layer_norm",
    "_softmax", "index_add", "index_put", "index_put_", "_unsafe_masked_index_put_accumulate", "scatter_add",
}  # fmt: skip
#: What reads its operands from memory.
EXTERN = {
    "mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "sort", "conv_statistics", "conv_sums",
    "position_sums",
}  # fmt: skip


# ---- the trace, every node with the part of the work that it belongs to


@contextmanager
def part(name):
    """What is recorded inside, and has no part of its own yet, belongs to this one."""
    mode = get_proxy_mode()
    last = None if mode is None else mode.tracer.graph._root.prev
    yield
    label = name() if callable(name) else name
    while last is not None and (last := last.next).op != "root":
        last.meta.setdefault("part", label)


def labelled(network=None):
    """The library's own parts, watched while they are traced; forward and backward of the network too, if it is given."""
    from dpivon.privacy.gradients.bookkeeping import BookKeeper
    from dpivon.privacy.layers.convolved import Convolved
    from dpivon.privacy.layers.made import Mapped
    from dpivon.privacy.layers.uses import Dense, Outer, Rows

    stack = ExitStack()

    def watch(owner, method, name):
        original = getattr(owner, method)

        def watched(self, *args, **kwargs):
            with part(lambda: name(self)):
                return original(self, *args, **kwargs)

        stack.enter_context(patch.object(owner, method, watched))

    def newest(keeper):
        shapes = [tuple(p.shape) for p in list(keeper._passes.batches[-1])[-2:]]
        return "gradients of examples " + " ".join("x".join(map(str, s)) for s in shapes)

    watch(BookKeeper, "_record", newest)
    for kind in (Dense, Outer, Rows, Convolved, Mapped):
        watch(kind, "squared_norm", lambda use: f"norms, {type(use).__name__} {_size(use)}")
        watch(kind, "weighted_sum", lambda use: f"sums, {type(use).__name__} {_size(use)}")
    watch(BookKeeper, "clipped_row", lambda keeper: "clip factors, masks")
    if network is not None:
        for layer in (nn.GroupNorm, nn.LayerNorm):
            watch(layer, "__call__", lambda layer: "forward of norm layers")
        watch(network, "__call__", lambda network: "forward")
        watch(Tensor, "backward", lambda loss: "backward")
        stack.enter_context(_weights_apart())
    return stack


@contextmanager
def _weights_apart():
    """Standardising weights, in the layer or in its rule's forward, is a part of its own."""
    from dpivon.models import standardised
    from dpivon.privacy.layers import conv as rule

    original = standardised.centred_rows

    def watched(weight):
        with part("standardised weights"):
            return original(weight)

    with patch.object(standardised, "centred_rows", watched), patch.object(rule, "centred_rows", watched):
        yield


def _size(use):
    known = [t.shape for t in (use, getattr(use, "outer", None)) if hasattr(t, "shape")]
    return "x".join(str(n) for n in (known[0] if known else use.g.shape[1:]))


def private_trace(model, batch, kernels=False):
    return _cleaned(private_program(model, batch, kernels).graph)


def private_program(model, batch, kernels=False):
    """The program of :mod:`dpivon.privacy.kernels.padded` for a mean batch of this size, as a GPU would record it in bf16."""
    from dpivon.privacy.kernels import conv_ops
    from dpivon.privacy.kernels.padded import PaddedGradients
    from dpivon.privacy.layers import uses
    from dpivon.privacy.layers.memory import Pool
    from dpivon.privacy.stack import room as _room
    from dpivon.stacked import AnyNetwork

    room = _room(batch)
    inputs, labels = batch_of(model, room, "cpu")
    network = AnyNetwork(lambda: build(model))
    with ExitStack() as stack:
        stack.enter_context(patch.object(uses, "MEMORY_CAP", uses.MEMORY_CAP_CUDA))
        stack.enter_context(
            patch.object(Pool, "lend", lambda pool, *of: torch.empty(of[0], dtype=of[1]))
        )  # a GPU has none
        stack.enter_context(patch.object(conv_ops, "device_takes", lambda device: True))
        stack.enter_context(conv_ops.kernels(on=kernels))
        gradients = PaddedGradients(network, torch.device("cpu"), torch.bfloat16)
        stack.enter_context(labelled(type(gradients.step.model)))

        def program(*tensors):
            return gradients._one(gradients.step.clipping.rescaled(1.0), *tensors)

        parameters = [p.clone() for p in gradients._parameters(network.initial(0))]
        return _recorded(program, *parameters, inputs, labels, torch.arange(room))


def plain_trace(model, batch):
    return _cleaned(plain_program(model, batch).graph)


def plain_program(model, batch):
    """Forward and backward without privacy."""
    network = build(model)
    params = dict(network.named_parameters())
    inputs, labels = batch_of(model, batch, "cpu")

    def program(inputs, labels, *values):
        leaves = [v.detach().requires_grad_() for v in values]
        with torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16):
                outputs = torch.func.functional_call(network, dict(zip(params, leaves, strict=True)), (inputs,))
            loss = torch.nn.functional.cross_entropy(outputs.float(), labels)
        with part("backward"):
            return torch.autograd.grad(loss, leaves)

    with labelled(type(network)):
        return _recorded(program, inputs, labels, *params.values())


def _traced(program, *args):
    return _cleaned(_recorded(program, *args).graph)


def _recorded(program, *args):
    import torch._inductor.lowering  # noqa: F401  # a decomposition reads it without importing it
    from torch._inductor.decomposition import select_decomp_table

    return make_fx(program, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args)


def _cleaned(graph):
    from torch._functorch.compile_utils import fx_graph_cse

    graph = fx_graph_cse(graph)
    graph.eliminate_dead_code()
    return graph


# ---- from nodes to kernels


@dataclass
class Kernel:
    part: str
    walks: int  # elements it goes over
    nodes: list = field(default_factory=list)
    reads: dict = field(default_factory=dict)  # stored node -> bytes
    writes: dict = field(default_factory=dict)
    flops: float = 0.0
    rate: float = PRODUCTS
    extern: bool = False

    @property
    def bytes(self):
        return sum(n for source, n in self.reads.items() if source not in self.writes) + sum(self.writes.values())

    @property
    def seconds(self):
        return max(self.bytes / BANDWIDTH, self.flops / self.rate)


def kernels_of(graph):
    """The kernels that a good compiler makes of a trace, in order."""
    sources, kernels, made_by = {}, [], {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            sources[node], made_by[node] = {node: _bytes(node)}, -1
            continue
        if node.op != "call_function":
            continue
        name = _name(node)
        operands = {}
        for given in node.all_input_nodes:  # of a tensor that is read in several parts, no more than the whole
            for k, v in sources.get(given, {}).items():
                operands[k] = min(_bytes(k), operands.get(k, 0) + v)
        if name in VIEWS:
            sources[node] = {k: min(v, _bytes(node)) for k, v in operands.items()}
            continue
        extern = name in EXTERN or "scaled_dot_product" in name
        if not extern and name not in REDUCTIONS and not _stored(node, operands):
            sources[node] = operands
            continue
        walks = max([_numel(node), *(_numel(n) for n in node.all_input_nodes)])
        found = None if extern else _shared(kernels, made_by, walks, operands)
        if found is None:
            found = Kernel(node.meta.get("part", "other"), walks, extern=extern)
            kernels.append(found)
        if extern:
            found.flops, found.rate = _flops(node), _rate(node)
        found.nodes.append(node)
        found.reads |= operands
        found.writes[node] = _bytes(node)
        sources[node], made_by[node] = {node: _bytes(node)}, kernels.index(found)
    return kernels


def _shared(kernels, made_by, walks, operands):
    """A kernel that walks the same tensor at a time when all operands are there."""
    ready = max((made_by[k] for k in operands), default=-1)
    for i, kernel in enumerate(kernels):
        if i < ready or kernel.extern or kernel.walks != walks:
            continue
        inside = [k for k in operands if k in kernel.writes]
        if any(_numel(k) < walks for k in inside):  # needs what the kernel only knows at its end
            continue
        if inside or any(k in kernel.reads and 2 * _numel(k) >= walks for k in operands):
            return kernel
    return None


def _stored(node, operands):
    if _widened(node):
        return False
    large = [k for k in operands if 2 * _numel(k) >= _numel(node)]
    return len(large) > FUSED_READS or any(_asks(user) for user in node.users)


def _asks(user):
    """Whether a user reads from memory: products and results do."""
    if user.op == "output":
        return True
    if _name(user) in VIEWS or _widened(user):
        return any(_asks(after) for after in user.users)
    return _name(user) in EXTERN or "scaled_dot_product" in _name(user)


def _widened(node):
    """A bf16 operand that is made fp32 for a product on a CPU; on a GPU the product reads it as it is."""
    cast = _name(node) in ("_to_copy", "convert_element_type") and _dtype(node) == torch.float32
    return cast and _dtype(node.all_input_nodes[0]) == torch.bfloat16


def _name(node):
    target = node.target
    if node.op != "call_function":
        return ""
    return target.__name__ if not hasattr(target, "overloadpacket") else target.overloadpacket.__name__


def _tensors(node):
    value = node.meta.get("val")
    return [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, Tensor)]


def _numel(node):
    return sum(t.numel() for t in _tensors(node)[:1])


def _bytes(node):
    """What its elements take in memory; an expanded dimension takes nothing."""
    return sum(math.prod(n for n, s in zip(t.shape, t.stride(), strict=True) if s) * t.itemsize for t in _tensors(node))


def _dtype(node):
    return _tensors(node)[0].dtype


def _flops(node):
    shapes = [tuple(_tensors(n)[0].shape) for n in node.all_input_nodes]
    name = _name(node)
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return 2.0 * _numel(node) * shapes[-2][-1]
    if "scaled_dot_product" in name:
        b, h, t, d = shapes[-1] if len(shapes[0]) != 4 else shapes[0]
        return (10.0 if "backward" in name else 4.0) * b * h * t * t * d
    if name in ("conv_statistics", "conv_sums"):
        return 2.0 * math.prod(shapes[1]) * shapes[0][1] * math.prod(node.args[-2][:2])
    if name == "convolution":
        return 2.0 * _numel(node) * math.prod(shapes[1][1:])
    if name == "convolution_backward":  # of the input, of the weight, or of both
        return 2.0 * math.prod(shapes[0]) * math.prod(shapes[2][1:]) * sum(node.args[-1][:2])
    return 0.0


def _rate(node):
    operands = [n for n in node.all_input_nodes if len(_tensors(n)[0].shape) > 1]  # not biases, not clip factors
    narrow = all(_source_dtype(n) == torch.bfloat16 for n in operands[:2])
    return PRODUCTS if narrow else FP32_PRODUCTS


def _source_dtype(node):
    while _name(node) in VIEWS:
        node = node.all_input_nodes[0]
    return torch.bfloat16 if _widened(node) else _dtype(node)


# ---- what is printed


def report(title, kernels, largest):
    total, seconds = sum(k.bytes for k in kernels), sum(k.seconds for k in kernels)
    print(f"{title}: {total / 1e6:,.0f} MB, {sum(k.flops for k in kernels) / 1e9:,.0f} GFLOP in {len(kernels)} kernels;"
          f" floor {1e3 * seconds:.3f} ms")  # fmt: skip
    parts = defaultdict(list)
    for kernel in kernels:
        parts[kernel.part].append(kernel)
    for name, group in sorted(parts.items(), key=lambda item: -sum(k.seconds for k in item[1])):
        print(f"{1e3 * sum(k.seconds for k in group):8.3f} ms {sum(k.bytes for k in group) / 1e6:8.0f} MB "
              f"{sum(k.flops for k in group) / 1e9:7.1f} GFLOP {len(group):4d} x {name}")  # fmt: skip
    for kernel in sorted(kernels, key=lambda k: -k.seconds)[:largest]:
        names = " ".join(dict.fromkeys(_name(n) for n in kernel.nodes))
        shapes = " ".join(f"{_kind(n)}{list(_tensors(n)[0].shape)}" for n in kernel.writes)
        reads = " ".join(f"{n / 1e6:.0f}" for n in sorted(kernel.reads.values(), reverse=True)[:6])
        print(f"    {1e3 * kernel.seconds:.3f} ms {kernel.bytes / 1e6:6.0f} MB  {kernel.part}: {names[:60]} -> {shapes[:90]} "
              f"from {reads} MB")  # fmt: skip
    return total, seconds


def _kind(node):
    return str(_dtype(node)).removeprefix("torch.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("cnn", "wrn", "vit", "text"), default="text")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--kernels", action="store_true", help="with the library's own kernels (DPIVON_CONV_KERNELS=1)")
    parser.add_argument("--largest", type=int, default=0, help="list this many kernels")
    chosen = parser.parse_args()
    args = chosen.model, chosen.batch
    plain = report(f"plain, {args[0]}, b = {args[1]}", kernels_of(plain_trace(*args)), chosen.largest)
    private = report(
        f"private, {args[0]}, b = {args[1]}", kernels_of(private_trace(*args, chosen.kernels)), chosen.largest
    )
    print(f"private over plain: bytes {private[0] / plain[0]:.2f}, floor {private[1] / plain[1]:.2f}")
