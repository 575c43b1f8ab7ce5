"""Tensors' memory from malloc; the setting belongs to the process, so each case has its own."""

import os
import platform
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch

from tests.memory.test_pool import run

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(platform.machine() == "aarch64", reason="torch's blocks may be mimalloc's"),
]
BEGIN = """
import json, torch
from lezero.memory import can_come_from_malloc, tensors_from_malloc
assert can_come_from_malloc()
"""


def test_tensors_are_aligned_and_live_as_before() -> None:
    code = """
    before = torch.arange(1000.0)
    assert tensors_from_malloc(True)
    made = [torch.empty(n, dtype=torch.uint8) for n in (1, 2, 63, 64, 65, 4096, 1 << 20, 5 << 20)]
    aligned = all(x.data_ptr() % 64 == 0 for x in made)
    none = torch.empty(0).data_ptr()
    grown = torch.arange(10.0)
    grown.resize_(100_000)
    kept = grown[:10].tolist() == list(range(10))
    shared = torch.arange(5.0).share_memory_().sum().item()
    assert tensors_from_malloc(False)
    del before
    after = made[5].fill_(3).sum().item(), (grown * 0).numel()
    del made, grown
    print(json.dumps([aligned, none, kept, shared, after]))
    """
    assert run(BEGIN + textwrap.dedent(code)) == [True, 0, True, 10.0, [3 * 4096, 100_000]]


def test_what_does_not_fit_is_torch_s_own_error() -> None:
    code = """
    tensors_from_malloc(True)
    try:
        torch.empty(10**15)
    except RuntimeError as error:
        print(json.dumps(str(error)))
    """
    assert "DefaultCPUAllocator" in run(BEGIN + textwrap.dedent(code))


def test_the_profiler_counts_it() -> None:
    code = """
    tensors_from_malloc(True)
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.empty(1 << 20, dtype=torch.uint8)
    print(json.dumps(max(event.self_cpu_memory_usage for event in profile.key_averages())))
    """
    assert run(BEGIN + textwrap.dedent(code)) == 1 << 20


def test_a_freed_tensor_s_room_fits_the_next_one() -> None:
    """Which is what posix_memalign does not give (glibc before 2.38)."""
    code = """
    from lezero.memory import HostPool
    HostPool(8 << 30).enable()
    large = [torch.empty(1 << 20) for _ in range(8)]
    places = {x.data_ptr() for x in large}
    for step in range(20):
        for i in range(8):
            large[i] = None
            large[i] = torch.empty(1 << 20)
    print(json.dumps({x.data_ptr() for x in large} == places))
    """
    assert run(BEGIN + textwrap.dedent(code)) is True


def test_the_pool_takes_it_and_gives_it_back() -> None:
    """The word before a block is where malloc's began, or glibc's size of it."""
    code = """
    import ctypes
    from lezero.memory import HostPool
    def is_from_malloc():
        block = torch.empty(1000)
        place = block.data_ptr()
        return 0 <= place - ctypes.c_size_t.from_address(place - 8).value <= 72
    pool = HostPool(8 << 30)
    found = [is_from_malloc()]
    pool.enable()
    found.append(is_from_malloc())
    pool.disable()
    print(json.dumps([*found, is_from_malloc()]))
    """
    assert run(BEGIN + textwrap.dedent(code)) == [False, True, False]


def test_memory_that_torch_frees_by_whatever_allocator_is_in_place() -> None:
    """oneDNN's memory is of either kind when it is freed, during a run and as the process ends."""
    code = """
    conv = torch.nn.Conv2d(3, 8, 3)
    x = torch.randn(2, 3, 32, 32)
    packed = [torch.randn(64, 64).to_mkldnn() for _ in range(4)]
    wanted = conv(x)
    tensors_from_malloc(True)
    del packed[:2]
    packed += [torch.randn(64, 64).to_mkldnn() for _ in range(4)]
    activations = torch.nn.functional.gelu(x), torch.nn.functional.gelu(x, approximate="tanh")
    same = torch.equal(conv(x), wanted)
    tensors_from_malloc(False)
    del packed[3:5], activations
    print(json.dumps(same))
    """
    assert run(BEGIN + textwrap.dedent(code)) is True


def test_without_a_compiler_tensors_stay_torch_s(tmp_path) -> None:
    code = """
    import json
    from lezero.memory import HostPool, can_come_from_malloc
    print(json.dumps([HostPool(8 << 30).enable(), can_come_from_malloc()]))
    """
    assert run(code, PATH=str(tmp_path), LEZERO_CACHE=str(tmp_path)) == [True, False]


PROGRAM = """
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
void *volatile taken[] = {(void *)&malloc, (void *)&free, (void *)&posix_memalign};
int main(int count, char **words) {
    void *library = dlopen(words[1], RTLD_NOW);
    if (!library) return puts(dlerror()), 1;
    int (*ask)(void) = (int (*)(void))dlsym(library, "lezero_tensors_can_come_from_malloc");
    return printf("%d", ask()), 0;
}
"""


def test_it_is_glibc_s_malloc_too_in_a_program_that_is_not_position_independent(tmp_path) -> None:
    """As some systems' Python: there the address of malloc lies in the program."""
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(PROGRAM)
    options = ("-x", "c", "-no-pie", "-fno-pic", "-o", program, source, "-ldl")
    subprocess.run([COMPILER, *options], check=True)
    code = "from lezero.memory.allocator import _library\nprint(json.dumps(_library()._name))"
    libraries = str(Path(torch.__file__).parent / "lib")
    done = subprocess.run(
        [program, run(BEGIN + code)], capture_output=True, text=True,
        env={**os.environ, "LD_LIBRARY_PATH": libraries},
    )  # fmt: skip
    assert done.stdout == "1"


def test_another_malloc_than_glibc_s_stays(tmp_path) -> None:
    """Its blocks could not be told from ours."""
    source, preload = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        "#include <stddef.h>\nvoid *__libc_malloc(size_t);\n"
        "void *malloc(size_t bytes) { return __libc_malloc(bytes); }\n"
    )
    subprocess.run([COMPILER, "-x", "c", "-shared", "-fPIC", "-o", preload, source], check=True)
    code = """
    import json
    from lezero.memory import HostPool, can_come_from_malloc, tensors_from_malloc
    enabled = HostPool(1 << 30).enable()
    print(json.dumps([enabled, can_come_from_malloc(), tensors_from_malloc(True)]))
    """
    found = run(textwrap.dedent(code), LD_PRELOAD=str(preload))
    assert found == [True, False, False]


def test_blocks_of_one_thread_are_recorded_while_it_is_asked() -> None:
    code = """
    import threading
    from lezero.memory import recorded
    made = []
    def run():
        thread = threading.Thread(target=lambda: made.append(torch.empty(1 << 20)))
        thread.start()
        thread.join()
        first = torch.empty(1000)
        second = torch.empty(10, dtype=torch.uint8)
        del first
        return second
    found = []
    for on in (False, True):
        tensors_from_malloc(on)
        second, blocks = recorded(run)
        found.append([each.bytes for each in blocks])
        assert blocks[0].address == blocks[2].address != blocks[1].address == second.data_ptr()
    assert recorded(lambda: None) == (None, [])
    try:
        recorded(lambda: torch.empty(-1))
    except RuntimeError:
        found.append([each.bytes for each in recorded(lambda: torch.empty(1))[1]])
    many = recorded(lambda: [torch.empty(1) for _ in range(5000)])
    print(json.dumps([*found, len(many[0]), many[1]]))
    """
    assert run(BEGIN + textwrap.dedent(code)) == [[4000, 10, -1], [4000, 10, -1], [4], 5000, None]
