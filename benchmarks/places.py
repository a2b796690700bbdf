"""How much others' shares of a clipped sum move when a library adds up their products in another order; no GPU is needed.

    python -m benchmarks.places --examples 64

The program that a GPU compiles is traced and run on a CPU: CompactCNN in bf16, three views of alike pictures, whose gradients
add up. Every convolution is added up in double, except those that a row names: in fp32, in torch's own order. Both are rounded
to bf16, as a GPU's are. So a row says what happens if everyone changes places and that convolution adds up in another order
there: `others` is the norm of the change, and `moved` by how much more than C the sum then moves for one missing example.

The second table says how much cancels in each parameter's gradient, over the positions of one view: the norm of Σ|terms| by
that of Σ terms.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

from dpivon import Augmentation
from dpivon.models import CompactCNN
from dpivon.privacy.kernels.padded import PaddedGradients
from dpivon.privacy.kernels.reference import autocast
from dpivon.privacy.layers.conv import unfold
from dpivon.stacked import AnyNetwork

BOUND, VIEWED, CPU = 0.1, Augmentation(3, flip=True, crop=4), torch.device("cpu")
FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


class Ordered(Interpreter):
    """The program with its convolutions added up in double, but those of these names in fp32."""

    def __init__(self, program: GraphModule, names=frozenset()):
        super().__init__(program)
        self.names, self.seen = names, {FORWARD: 0, BACKWARD: 0}

    def call_function(self, target, args, kwargs):
        if target not in self.seen:
            return super().call_function(target, args, kwargs)
        self.seen[target] += 1
        name = f"{'forward' if target is FORWARD else 'backward'} {self.seen[target]}"
        wide, low = torch.float32 if name in self.names else torch.float64, args[0].dtype
        found = super().call_function(target, tuple(t.to(wide) if isinstance(t, Tensor) else t for t in args), kwargs)
        return found.to(low) if isinstance(found, Tensor) else tuple(t if t is None else t.to(low) for t in found)


def alike(examples: int, offset: float) -> tuple[Tensor, ...]:
    """Pictures, labels and views."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(examples, 3, 32, 32, generator=generator)
    views = VIEWED.choice(list(torch.randint(2**32, (3, examples, VIEWED.views), generator=generator)))
    return pictures[:1] + 0.01 * pictures + offset, torch.full((examples,), 3), views


def orders(examples: int, offset: float):
    """(name, others, moved) for every convolution, and for all of a pass."""
    network = AnyNetwork(CompactCNN)
    theta = network.initial(0)
    pictures, labels, views = alike(examples, offset)
    traced = PaddedGradients(network, CPU, torch.bfloat16, VIEWED)
    everyone = torch.arange(examples)
    program = traced._trace(BOUND, False, theta, pictures, labels, everyone, views)

    def sums(places, names=frozenset()):
        with torch.no_grad():
            return Ordered(program, names).run(theta, pictures, labels, places, views)

    whole = sums(everyone)
    share = whole - sums(everyone.masked_fill(everyone == 0, examples))
    yield "none", 0.0, float(share.norm()) / BOUND - 1
    forward, backward = ([f"{way} {i + 1}" for i in range(n)] for way, n in (("forward", 5), ("backward", 4)))
    rows = {"forward, all": forward, "backward, all": backward, **{n: [n] for n in (*forward, *backward)}}
    for name, names in rows.items():
        others = sums(everyone, frozenset(names)) - whole
        yield name, float(others.norm()) / BOUND, float((share + others).norm()) / BOUND - 1


def cancelled(offset: float):
    """(parameter, ‖Σ|terms|‖ / ‖Σ terms‖) for one view of the first picture."""
    model = AnyNetwork(CompactCNN).model(AnyNetwork(CompactCNN).initial(0))
    pictures, labels, _ = alike(1, offset)
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name, layer):
        def after(layer, args, output):
            output.register_hook(lambda g: kept.setdefault(name, (args[0].detach().float(), g.float())) and None)

        layer.register_forward_hook(after)

    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.GroupNorm):
            watch(name, layer)
    with autocast(CPU, torch.bfloat16):
        outputs = model(pictures)
    nn.functional.cross_entropy(outputs.float(), labels).backward()
    for name, layer in model.named_modules():
        if name not in kept:
            continue
        x, g = kept[name]
        g = g[0].flatten(1)
        if isinstance(layer, nn.Conv2d):
            x = unfold(layer, x.bfloat16().float())[0].flatten(0, 1)
            yield f"{name}.weight", float((g.abs() @ x.abs().T).norm() / (g @ x.T).norm())
        else:
            z = nn.functional.group_norm(x, layer.num_groups)[0].flatten(1)
            yield f"{name}.weight", float((g * z).abs().sum(1).norm() / (g * z).sum(1).norm())
        yield f"{name}.bias", float(g.abs().sum(1).norm() / g.sum(1).norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--offsets", type=float, nargs="+", default=[0.0, 30.0])
    given = parser.parse_args()
    for offset in given.offsets:
        print(f"\n{given.examples} examples, offset {offset:g}, torch {torch.__version__}: others / C, moved / C - 1")
        for name, others, moved in orders(given.examples, offset):
            print(f"  {name:14} {others:9.2e} {moved:+10.2e}", flush=True)
        print("  cancelled: " + ", ".join(f"{n.removeprefix('features.')} {v:.1f}" for n, v in cancelled(offset)))


if __name__ == "__main__":
    main()
