"""Compile kernels for sm_90 without a GPU, in other processes, because the tests' process
interprets them."""
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from types import ModuleType, SimpleNamespace

import pytest

# Registers are asserted for the pinned compiler. They are also asserted for a second one if
# OTHER_TRITON names the folder in which it is installed: pip install triton==3.6.0 --no-deps
# --target FOLDER; OTHER_TRITON=FOLDER pytest -m "" -k sm_90
OTHER_TRITON = os.environ.get("OTHER_TRITON", "")
COMPILERS = [pytest.param("", id="pinned"), pytest.param(OTHER_TRITON, id="other", marks=[
    pytest.mark.slow, pytest.mark.skipif(not OTHER_TRITON, reason="OTHER_TRITON names no folder")])]
by_the_pinned_compiler = pytest.mark.skipif(not version("triton").startswith("3.7."),
                                            reason="what kernels use is known of triton 3.7")


def run(code: str, compiler: str = "", **env: str) -> str:
    """Run code in a process that compiles kernels, and return what it prints.

    compiler: the folder of a triton to use instead of the installed one.
    """
    if compiler:
        env["PYTHONPATH"] = os.pathsep.join([compiler, os.environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "0"} | env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ahead(kernel, signature: dict[str, str], constants: dict, **options) -> dict:
    """Return a kernel's PTX, its shared memory, and the resources of its machine code.

    The resources are REG (registers per thread), STACK, LOCAL and more. Pointers and sizes are
    multiples of 16, which Triton tells its compiler at such a launch, too.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    source = triton.compiler.ASTSource(
        fn=kernel, signature={name: signature.get(name, "constexpr") for name in names}, constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in signature})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return resources(made.asm["cubin"]) | dict(ptx=made.asm["ptx"], shared=made.metadata.shared)


def resources(cubin: bytes) -> dict[str, str]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"(\w+):(\d+)", used))


def only_compile(*modules: ModuleType) -> None:
    """Let all later launches of these modules compile instead of run, and print [kernel, its
    resources] as JSON."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    hopper = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
                             get_current_stream=lambda device: 0)

    def compiled(self, *args, grid, warmup, **options):
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        used = {name: int(count) for name, count in resources(kernel.asm["cubin"]).items()}
        ptx = kernel.asm["ptx"]
        more = dict(wgmma=ptx.count("wgmma.mma_async"), setmaxnreg=ptx.count("setmaxnreg"), nan="min.NaN" in ptx,
                    threads=int(re.search(r"\.reqntid (\d+)", ptx)[1]), shared=kernel.metadata.shared,
                    casts=sorted(set(re.findall(r"cvt\.\S*x2\.f32", ptx))),
                    loads=ptx.count("ld.global.v4.b32"), stores=ptx.count("st.global.v4.b32"))
        print(json.dumps([kernel.metadata.name, used | more]))

    launch, JITFunction.run = JITFunction.run, compiled
    triton.runtime.driver.set_active(hopper)
    for module in modules:
        module.launch = lambda kernel, grid, *args, **options: kernel[grid](*args, **options)


def fits(name: str, used: dict[str, int], spilled: int = 0) -> None:
    """Assert that at most `spilled` bytes per thread are spilled, and that shared memory fits an
    H100 or H200.

    A program may have 227 KiB of shared memory there.
    """
    assert used["STACK"] <= spilled and used["LOCAL"] == 0 and used["REG"] <= 255, (name, used)
    assert used["shared"] <= 227 * 1024, (name, used)
