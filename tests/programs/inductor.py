"""How long torch's compiler takes for a captured step, on a machine without a GPU: seconds of this process up to the source of
its kernels, how many of those there are, and in how many configurations each is compiled and timed at first use.

    PYTHONPATH=src:tests:. python -m programs.inductor --model wrn --batch 256
    PYTHONPATH=src:tests:. python -m programs.inductor --model wrn --batch 256 --kernels --save program.py

The program is traced on the CPU with tensors that hold nothing; then every tensor is said to be on an H200, and the compiler is
stopped before it would compile its kernels. Needs Triton, and reaches into torch: made for 2.13. What comes before (recording,
guards) and after (Triton for every configuration, side by side; timing them) is not in the count. What the kernels read and
write is in :mod:`programs.where`.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from dpivon.privacy import precision
from programs.traffic import _cleaned, part, private_program

GPU = torch.device("cuda:0")
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30, warp_size=32, gcnArchName="",
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536, L2_cache_size=60 << 20,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
)  # fmt: skip


class Stopped(Exception):
    """After the source is there."""


def functional(program):
    """Without writes into tensors, as the compiler takes it, and everything on the GPU; what a node is part of is kept."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensor

    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    mode = inputs[0].fake_mode
    with mode:
        pure = torch.func.functionalize(_Labelled(program).run, remove="mutations")
        made = make_fx(pure, decomposition_table=select_decomp_table())(*inputs)
    graph = _cleaned(made.graph)
    output = next(iter(reversed(graph.nodes)))
    output.args = (tuple(tree_leaves(output.args)),)

    def moved(value):
        if not isinstance(value, FakeTensor):
            return value
        empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(mode, empty, GPU)

    for node in graph.nodes:
        assert node.op != "get_attr", "a constant would stay on the CPU"
        if "device" in node.kwargs:
            node.kwargs = node.kwargs | {"device": GPU}
        node.meta["val"] = tree_map(moved, node.meta.get("val"))
    return torch.fx.GraphModule(made, graph), [moved(t) for t in inputs], mode


class _Labelled(torch.fx.Interpreter):
    """Runs a program node by node; what is recorded of it on the way belongs to the same part."""

    def run_node(self, n):
        if "part" not in n.meta:
            return super().run_node(n)
        with part(n.meta["part"]):
            return super().run_node(n)


def pretend() -> ExitStack:
    """That there is an H200, with cuDNN."""
    import torch._inductor.fx_passes.reinplace as reinplace
    import triton.runtime.driver as triton_driver
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget

    class Interface(device_interface.CudaInterface):
        is_available = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 0)
        get_compute_capability = staticmethod(lambda device=None: 90)
        get_device_properties = staticmethod(lambda device=None: H200)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

        class Worker(device_interface.CudaInterface.Worker):
            current_device = staticmethod(lambda: 0)
            get_device_properties = staticmethod(lambda device=None: H200)

    for answered in vars(torch.utils._triton).values():  # torch remembers that there was no device
        getattr(answered, "cache_clear", lambda: None)()
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, Interface)
    triton_driver._active = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    stack, answers = ExitStack(), {"is_available": True, "current_device": 0, "device_count": 1, "_exchange_device": 0}
    answers |= {
        "_maybe_exchange_device": 0,
        "get_device_properties": H200,
        "_get_device_properties": H200,
        "_lazy_init": None,
    }
    answers |= {"get_device_capability": (9, 0), "get_device_name": H200.name}
    answers |= {"get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None}
    for name, answer in answers.items():
        stack.enter_context(patch.object(torch.cuda, name, lambda *args, answer=answer: answer, create=True))
    stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
    stack.enter_context(patch.object(torch._C, "_conv_determine_backend_memory_format", _as_cudnn))
    # A part of a tensor is written: what matters is the result's shape, and to write it asks for a driver.
    stack.enter_context(patch.object(reinplace, "_inplace_generalized_scatter", lambda into, *_: into.clone()))
    return stack


def _as_cudnn(x, weight, backend) -> torch.memory_format:
    """How a convolution's result lies: channels last if one of its operands does, which torch without cuDNN would not say."""
    last = torch.channels_last
    return last if any(suggest_memory_format(t) == last for t in (x, weight)) else torch.contiguous_format


def source(program, inputs, mode, options: dict, look: Callable[[list], None] = lambda kernels: None) -> str:
    """What the compiler writes; how long it takes is printed on the way. ``look`` is shown its kernels, in order; ``options``
    are what it is told."""
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler

    written, start = [], time.process_time()
    fuse, codegen = Scheduler.fuse_nodes, GraphLowering.codegen

    def fused(self, nodes):
        began = time.process_time()
        found = fuse(self, nodes)
        print(
            f"fusion: {time.process_time() - began:.1f} s, {len(nodes)} operations in {len(found)} kernels", flush=True
        )
        return found

    def coded(self):
        print(f"lowering: {time.process_time() - start:.1f} s", flush=True)
        written.append(codegen(self)[0].value)
        look(self.scheduler.nodes)
        raise Stopped

    with ExitStack() as stack:
        stack.enter_context(patch.object(Scheduler, "fuse_nodes", fused))
        stack.enter_context(patch.object(GraphLowering, "codegen", coded))
        stack.enter_context(config.patch(options | {"fx_graph_cache": False}))
        stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
        try:
            compile_fx.compile_fx_inner(program, inputs)
        except Exception:
            if not written:
                raise
    print(f"in all: {time.process_time() - start:.1f} s", flush=True)
    return written[0]


def configurations(code: str) -> list[int]:
    """Of every kernel in the source, how many."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers

    found = []
    with patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
        for text in re.findall(r"async_compile\.triton\(.*?'''(.*?)''', device_str", code, re.DOTALL):
            name = re.search(r"def (triton_\w+)\(", text).group(1)
            found.append(len(getattr(PyCodeCache.load(text.replace("\\\\", "\\")), name).configs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("wrn", "text"), default="wrn")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--kernels", action="store_true", help="with the library's own kernels (DPIVON_CONV_KERNELS=1)")
    parser.add_argument("--save", help="where to write the source")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    program = private_program(args.model, args.batch, args.kernels)
    print(f"trace: {time.process_time() - began:.1f} s, {len(program.graph.nodes)} nodes", flush=True)
    with pretend():
        code = source(*functional(program), precision.options(again=args.kernels))
        each = configurations(code)
    print(f"{len(each)} kernels, {sum(each)} configurations")
    if args.save:
        with open(args.save, "w") as file:
            file.write(code)


if __name__ == "__main__":
    main()
