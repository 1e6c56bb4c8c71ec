"""Compiles every kernel for GPUs that are not there, and says what each needs: `python -m tests.ops.offline_compile`.

The launchers themselves run, on fake CUDA tensors, and each launch they make is caught and compiled with exactly the
types, constants and options it asked for. To add a kernel, add a function to LAUNCHES that calls its launcher.
One line of JSON per kernel and architecture; run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory one program may ask for, by architecture."""
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Compiled:
    launch: str
    kernel: str
    size: str
    arch: int
    shared: int
    """Bytes."""
    registers: int
    stack: int
    """Bytes per thread; anything but 0 means that registers were spilled."""


@dataclass(frozen=True, kw_only=True)
class Dims:
    """The sizes of a model that kernels see."""

    hidden: int
    intermediate: int
    key_heads: int
    value_heads: int
    heads: int
    kv_heads: int
    head_dim: int = 256
    gdn_dim: int = 128

    @property
    def keys(self) -> int:
        return self.key_heads * self.gdn_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.gdn_dim

    @property
    def proj(self) -> int:
        columns = 2 * self.keys + 2 * self.values + 2 * self.value_heads
        return columns + -columns % 16


DIMS = {
    "9b": Dims(hidden=4096, intermediate=12288, key_heads=16, value_heads=32, heads=16, kv_heads=4),
    "27b": Dims(hidden=5120, intermediate=17408, key_heads=16, value_heads=48, heads=24, kv_heads=4),
}
SIZE_OF = {80: "9b", 89: "27b", 90: "9b", 100: "27b"}
"""The model whose kernels are compiled for each architecture."""
ROWS = 128
SLOTS = 4


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=CUDA)


def tables() -> torch.Tensor:
    from ops.tables import TABLE_WORDS

    return empty(TABLE_WORDS, dtype=torch.int32)


def rows(d: Dims) -> None:
    from ops.kernels import rows as k
    from ops.tables import ROW_TOKEN

    k.launch_add_rms_norm(empty(ROWS, d.hidden), empty(ROWS, d.hidden), empty(d.hidden), 1e-6)
    k.launch_gated_rms_norm(
        empty(ROWS, d.values), empty(ROWS, d.proj), empty(d.gdn_dim, dtype=torch.float32), 1e-6, 2 * d.keys + d.values
    )
    k.launch_silu_mul(empty(ROWS, 2 * d.intermediate))
    k.launch_add_rows(empty(ROWS, d.proj), empty(ROWS, d.proj))
    k.launch_take_rows(empty(1000, d.hidden), tables(), ROW_TOKEN, ROWS)


def gdn_conv(d: Dims) -> None:
    from ops.kernels.gdn_conv import launch_gdn_conv
    from ops.sizes import ConvSizes

    channels = 2 * d.keys + d.values
    proj, weight = empty(ROWS, d.proj), empty(channels, 4)
    a_log, dt_bias = empty(d.value_heads, dtype=torch.float32), empty(d.value_heads)
    tail_kv = empty(SLOTS, 64, d.keys + d.values)
    tail_gates = empty(SLOTS, 64, 2 * d.value_heads + d.key_heads, dtype=torch.float32)
    sizes = ConvSizes.of(proj, weight, a_log, tail_kv, tail_gates)
    history = empty(SLOTS, 3, channels)
    launch_gdn_conv(proj, weight, a_log, dt_bias, tables(), history, tail_kv, tail_gates, sizes)


def delta_rule(d: Dims) -> None:
    from ops.kernels.delta_rule import launch_delta_rule
    from ops.sizes import DeltaSizes

    qkv = empty(ROWS, 2 * d.keys + d.values)
    gates = empty(ROWS, 2 * d.value_heads + 2 * d.key_heads, dtype=torch.float32)
    tail_kv = empty(SLOTS, 64, d.keys + d.values)
    tail_gates = empty(SLOTS, 64, 2 * d.value_heads + d.key_heads, dtype=torch.float32)
    states = empty(SLOTS, d.value_heads, d.gdn_dim, d.gdn_dim, dtype=torch.float32)
    launch_delta_rule(qkv, gates, tail_kv, tail_gates, states, tables(), DeltaSizes.of(tail_gates, states))


def attention(d: Dims) -> None:
    from ops.kernels.attention import launch_attention
    from ops.kernels.attention_prepare import launch_attention_prepare

    width = d.kv_heads * d.head_dim
    proj = empty(ROWS, 2 * d.heads * d.head_dim + 2 * width)
    q_norm, k_norm, rope = empty(d.head_dim), empty(d.head_dim), empty(1024, d.head_dim // 4)
    k_cache, v_cache = empty(1000, width), empty(1000, width)
    for reads in (False, True):
        q, k, v = launch_attention_prepare(
            proj, proj, q_norm, k_norm, rope, k_cache, v_cache, tables(), 1e-6, 2 * d.heads * d.head_dim, reads
        )
        launch_attention(q, proj, k_cache, v_cache, k, v, tables(), d.head_dim, reads)


def linear(d: Dims) -> None:
    from ops.kernels.linear import launch_linear_fixed

    for outputs, inputs in ((d.proj, d.hidden), (d.hidden, d.values), (d.hidden, d.intermediate)):
        launch_linear_fixed(empty(ROWS, inputs), empty(outputs, inputs))


LAUNCHES: dict[str, Callable[[Dims], None]] = {
    "rows": rows,
    "gdn_conv": gdn_conv,
    "delta_rule": delta_rule,
    "attention": attention,
    "linear": linear,
}


def caught_launches(launch: Callable[[], None], arch: int) -> list[tuple[ASTSource, dict[str, Any]]]:
    """What `launch` would compile on this architecture, each once: (source with types and constants, options)."""
    caught = {}

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        signature, constants, aligned = {}, {}, {}
        for parameter in kernel.params:
            value, name = named.pop(parameter.name), parameter.name
            signature[name], is_constant, is_aligned = _argument(value, parameter)
            if is_constant:
                constants[name] = value
            if is_aligned:
                aligned[(parameter.num,)] = [["tt.divisibility", 16]]
        caught[repr((kernel, signature, constants, named))] = (ASTSource(kernel, signature, constants, aligned), named)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(arch, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(multi_processor_count=132)),
        FakeTensorMode(),
    ):
        launch()
    return list(caught.values())


def _argument(value: Any, parameter: Any) -> tuple[str, bool, bool]:
    """(type in the signature, is a constant, is a multiple of 16), by the rules of the just-in-time compiler."""
    if parameter.is_constexpr or value is None:
        return "constexpr", True, False
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
    if isinstance(value, torch.Tensor):
        return f"*{names[value.dtype]}", False, True
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{names[value.base.dtype]}{list(value.block_shape)}>", False, False
    if isinstance(value, float):
        return "fp32", False, False
    if parameter.do_not_specialize:
        return "i32", False, False
    return ("constexpr", True, False) if value == 1 else ("i32", False, value % 16 == 0)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    assert found, said.stdout
    return int(found[1]), int(found[2])


def compile_one(launch: str, size: str, arch: int, source: ASTSource, options: dict[str, Any]) -> Compiled:
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, stack = resources(compiled.asm["cubin"])
    return Compiled(launch, source.fn.__name__, size, arch, compiled.metadata.shared, registers, stack)


def main(names: list[str]) -> None:
    """All launches, or the named ones."""
    work = []
    for name in names or LAUNCHES:
        for arch, size in SIZE_OF.items():
            launches = caught_launches(lambda launch=LAUNCHES[name], d=DIMS[size]: launch(d), arch)
            work += [(name, size, arch, source, options) for source, options in launches]
    with ThreadPoolExecutor(2) as pool:
        for compiled in pool.map(lambda item: compile_one(*item), work):
            print(json.dumps(asdict(compiled)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
