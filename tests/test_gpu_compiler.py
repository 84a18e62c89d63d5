"""What XLA:GPU puts beside an exchange. It compiles without a GPU: `benchmarks/schedules.py`."""

import importlib.util
import re

import pytest
import running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda12_plugin") is None,
        reason="XLA:GPU is not installed: pip install jax-cuda12-plugin jax-cuda12-pjrt "
        "nvidia-cuda-nvcc-cu12",
    ),
]


ON_HOSTS = {  # of one GPU, and of eight, over which parameters are cut
    (): ["plain jit", "dense", "int8", "top_k", "int8, one bucket", "int8, delay=1"],
    ("--hosts", "2", "--devices", "8", "--width", "6144"): ["plain jit", "dense", "int8", "top_k"],
}


@pytest.mark.parametrize("hosts", ON_HOSTS, ids=lambda hosts: "of eight" if hosts else "of one")
def test_exchanges_hide_behind_the_backward_pass(hosts):
    names = ON_HOSTS[hosts]
    script = running.ROOT / "benchmarks" / "schedules.py"
    printed = running.python(script, *hosts, "--only", *names)
    beside = dict(zip(names, map(int, re.findall(r"(\d+) beside", printed))))
    assert min(beside["dense"], beside["int8"]) >= beside["plain jit"] > 0
    assert beside["top_k"] >= beside["plain jit"] / 2
    if not hosts:
        assert beside["int8, delay=1"] >= beside["plain jit"]
        assert beside["int8, one bucket"] == 0


def test_the_program_of_the_page_runs():
    page = (running.ROOT / "docs" / "accelerators.md").read_text()
    (program,) = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    printed = running.python("-c", program)
    assert "all-to-all" in printed
    assert "temp_size_in_bytes" in printed
