"""Descriptions of GPUs, to compile programs for GPUs that need not be there."""

import os
import sys
from typing import Any

import jax
from jax.experimental import topologies

# NVIDIA's data sheet of the H200 SXM, and the limits of compute capability 9.0.
_H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 8 }
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def h200(count: int = 1) -> list[Any]:
    """Devices of one host, for which programs can be compiled, and nothing else.

    Call it before JAX looks for devices. If there are GPUs, it asks none. It ends the program if
    JAX's plugin for CUDA is not installed.
    """
    jax.config.update("jax_platforms", "cpu")
    # Variants of a kernel can't be tried to find the fastest.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=_H200, topology=f"1x1x{count}"
        )
    except (NotImplementedError, RuntimeError) as error:
        sys.exit(f'{error}: pip install "jax[cuda12]", of the same version as jax')
    return list(described.devices)
