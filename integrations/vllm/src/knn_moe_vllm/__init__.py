"""Routing memories in vLLM, which loads this plugin in each of its processes.

    vllm serve MODEL --additional-config '{"knn_moe": {}}' --enable-lora \\
        --lora-modules medicine=FOLDER law=FOLDER     # a memory for each request that names one
    vllm serve MODEL --additional-config '{"knn_moe": {"memory": "FOLDER"}}'   # one for all

A server without "knn_moe" in its configuration runs as if the plugin were not installed.
"""


def register() -> None:
    """Put the plugin into this process. vLLM may call it more than once."""
    from knn_moe_vllm import adapters, gate, loading

    gate.install()
    loading.install()
    adapters.install()
