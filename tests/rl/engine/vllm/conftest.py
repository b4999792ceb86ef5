"""What vLLM serves in tests."""

import pytest
from own_vllm import build


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A small base model whose heads vLLM has CPU kernels for."""
    return build(tmp_path_factory.mktemp("base"))
