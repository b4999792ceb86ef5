"""What vLLM serves in tests, and generators over servers that are not what they should be."""

from dataclasses import replace
from functools import partial

import pytest
from faulty_server import KEY, STOP, TOKENS, FaultyServer
from own_vllm import build

from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.generator import Sampling
from scalerl.rl.engine.vllm import server_pool
from scalerl.rl.engine.vllm.generator import VllmGenerator
from scalerl.rl.model.causal_lm import load_model, load_tokenizer
from scalerl.rl.model.weights import weights_of


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A small base model whose heads vLLM has CPU kernels for."""
    return build(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def tokenizer(llama_folder):
    return load_tokenizer(llama_folder)


@pytest.fixture(scope="session")
def weights(llama_folder):
    return weights_of(load_model(llama_folder))


@pytest.fixture
def peer(tokenizer):
    server = FaultyServer(tokenizer, TOKENS)
    yield server
    server.close()


@pytest.fixture
def connect(llama_folder, tokenizer, weights, rule, tmp_path, monkeypatch):
    """A function that makes a generator over servers; it ends with the test."""
    made = []
    monkeypatch.setenv("SCALERL_VLLM_API_KEY", KEY)
    monkeypatch.setattr(server_pool, "CHECK_EVERY", 0.1)

    def make(*peers, slots=8, length=rule, timeline=None, environment=None, place=None, **changes):
        settings = Vllm(urls=tuple(peer.url for peer in peers), weights_folder=str(tmp_path))
        settings = replace(settings, **{"start_seconds": 20.0, "answer_seconds": 5.0, **changes})
        sampling = Sampling(1.0, True, 0, 24, length, STOP)
        how = {"slots": slots, "timeline": timeline, "environment": environment}
        if place:  # which knows the URLs
            settings, how["place"] = replace(settings, urls=()), partial(place, settings)
        made.append(VllmGenerator(settings, sampling, tokenizer, llama_folder, weights, **how))
        return made[-1]

    yield make
    for generator in made:
        generator.close()
