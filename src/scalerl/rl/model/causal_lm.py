"""Models and tokenizers in Hugging Face format, and log-probabilities from hidden states.

Generator and learner share `head_of` and `logits_of`, so that both compute the LM head in the same way.

Shapes in names: B sequences, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.errors import InputError, brief, counted, in_one_line
from scalerl.model_config import read_model_config
from scalerl.rl.config.devices import ASSUMED, VISIBLE, Gpu, free_of_gpus, visible_gpus
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.types import Prompt, UserText


def load_model(path: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a causal LM from a folder or by name, ready for training, in its own precision or in `dtype`.

    Raises:
        InputError: there is no such model, or its files do not have all of its weights.
    """
    from transformers import AutoModelForCausalLM

    with in_one_line(f"model {path} cannot be loaded"):
        _check_config(path)
        how = {"attn_implementation": "sdpa", "dtype": dtype or "auto", "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **how)
        model, found = loaded
    if missing := sorted(found["missing_keys"]):  # transformers initialises these at random
        what = f"{counted(len(missing), 'tensor')} of its config.json, as {missing[0]}"
        raise InputError(f"model {path} cannot be loaded (its files lack {what})")
    without_dropout(model)
    return model


def empty_model(path: str | Path, dtype: torch.dtype) -> nn.Module:
    """Return a causal LM without weights (on the device `meta`); only its config is read.

    Raises:
        InputError: there is no such model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with in_one_line(f"model {path} cannot be loaded"), torch.device("meta"):
        _check_config(path)
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of a recipe's `precision`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def compute_device() -> torch.device:
    """Return the device of all models of a run: the current GPU if there is one, otherwise the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpus_in_use() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use, in CUDA's order, or those that SCALERL_GPUS simulates.

    The list is PyTorch's: nvidia-smi may be missing, as in a container, does not list MIG slices, and may
    order GPUs differently. Only free memory comes from nvidia-smi, because CUDA would take memory on each GPU
    to report it.
    """
    if os.environ.get(ASSUMED):
        return visible_gpus()
    if not torch.cuda.is_available():
        return ()
    names, free, found = os.environ.get(VISIBLE, ""), free_of_gpus(), list[Gpu]()
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        memory = int(about.total_memory)
        name = names.split(",")[i].strip() if names else str(i)
        found.append(Gpu(name, memory, min(free.get(str(about.uuid), memory), memory)))
    return tuple(found)


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model.

    Raises:
        InputError: there is no such tokenizer.
    """
    from transformers import AutoTokenizer

    with in_one_line(f"tokenizer of {path} cannot be loaded"):
        return AutoTokenizer.from_pretrained(path)


def end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a completion: the tokenizer's first, then those of generation_config.json.

    Chat models often have two: the end of a turn and the end of a text.
    """
    more = _generation_end_tokens(tokenizer.name_or_path) - {tokenizer.eos_token_id}
    return (tokenizer.eos_token_id, *sorted(more))


def stop_tokens(tokenizer: Any, stop: Sequence[str]) -> tuple[int, ...]:
    """Return the tokens whose text begins with one of `stop`.

    Raises:
        InputError: no token begins with one of them, so that a single token does not show it.
    """
    if not stop:
        return ()
    ids = range(len(tokenizer))
    texts = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    for text in stop:
        if not any(one.startswith(text) for one in texts):
            raise InputError(f"stop: no token of {tokenizer.name_or_path} begins with {brief(text)}")
    return tuple(i for i in ids if texts[i].startswith(tuple(stop)))


@functools.cache
def _generation_end_tokens(path: str) -> frozenset[int]:
    """Return `eos_token_id` of a generation_config.json as a set; empty if there is none."""
    from transformers import GenerationConfig

    try:
        found: Any = GenerationConfig.from_pretrained(path).eos_token_id if path else None
    except OSError:  # the file is optional
        found = None
    return frozenset([found] if isinstance(found, int) else found or ())


def prompt_tokens(tokenizer: Any, prompt: Prompt) -> np.ndarray:
    """Return the tokens of a prompt, shape (T,): messages by the chat template, a text as it is.

    No special tokens are added to a text; messages end with the generation prompt.

    Raises:
        InputError: the tokenizer has no chat template, or the template refuses the conversation.
    """
    if prompt.messages is None:
        return np.array(tokenizer(prompt.text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise InputError("the tokenizer has no chat template: task.chat_template must be false")
    messages = [{"role": role, "content": content} for role, content in prompt.messages]
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **dict(prompt.template_args)
        )
    except TemplateError as error:
        raise InputError(f"the chat template refuses prompt {prompt.id} ({error})") from error
    return np.array(ids, dtype=np.int64)


_A_TURN = "a turn of the model"


def answer_tokens(tokenizer: Any, prompt: Prompt, answers: Sequence[str]) -> np.ndarray:
    """Return the tokens between a turn's end token and the next turn, (T,); none without answers.

    If the prompt has messages, every answer is a message of the role `tool`, or `user` (`UserText`), and the
    generation prompt follows; otherwise the answers are appended as they are.

    Raises:
        InputError: the chat template refuses such messages, or changes the text before them.
    """
    if not answers:
        return np.zeros(0, dtype=np.int64)
    text = "".join(answers) if prompt.messages is None else _messages_behind(tokenizer, prompt, answers)
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def _messages_behind(tokenizer: Any, prompt: Prompt, answers: Sequence[str]) -> str:
    """Return the chat template's text for answers to a turn, after the turn's end token."""
    from jinja2 import TemplateError

    turn: dict[str, Any] = {"role": "assistant", "content": _A_TURN}
    if not all(isinstance(answer, UserText) for answer in answers):
        call = {"type": "function", "function": {"name": "tool", "arguments": {}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    before: list[dict[str, Any]] = [{"role": "user", "content": "?"}, turn]
    said = [
        {"role": "user", "content": str(answer)}
        if isinstance(answer, UserText)
        else {"role": "tool", "name": "tool", "content": answer}
        for answer in answers
    ]
    how = {"tokenize": False, **dict(prompt.template_args)}
    try:
        head = tokenizer.apply_chat_template(before, **how)
        text = tokenizer.apply_chat_template([*before, *said], add_generation_prompt=True, **how)
    except TemplateError as error:
        raise InputError(f"the chat template refuses messages of tools ({error})") from error
    ends = [tokenizer.convert_ids_to_tokens(token) for token in end_tokens(tokenizer)]
    if _A_TURN in text:  # templates may drop the thinking of a turn once a user has answered it
        _, _, behind = text.partition(_A_TURN)
        return behind.removeprefix(next((end for end in ends if behind.startswith(end)), ""))
    # Up to the last end token: text that a template writes after it belongs to the answer.
    head = head[: max([head.rfind(end) + len(end) for end in ends if end in head], default=len(head))]
    if not text.startswith(head):
        raise InputError("the chat template writes a turn otherwise once a tool has answered it")
    return text[len(head) :]


def unknown_word(tokenizer: Any, prompt: Prompt, token_T: np.ndarray) -> str | None:
    """Return the first word of a prompt with tokens `token_T` that the tokenizer does not know, or None."""
    # Hand-made tokenizers may define the unknown token only in their model.
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    name = tokenizer.unk_token or getattr(model, "unk_token", None)
    unknown = tokenizer.convert_tokens_to_ids(name) if name else None
    # A token that is also the end or start token (as in GPT-2) does not mark unknown words.
    if unknown in (None, tokenizer.eos_token_id, tokenizer.bos_token_id) or unknown not in token_T:
        return None
    if prompt.messages is not None or not tokenizer.is_fast:
        return name
    found = tokenizer(prompt.text, add_special_tokens=False, return_offsets_mapping=True)
    places = zip(found["input_ids"], found["offset_mapping"], strict=True)
    words = (prompt.text[start:end] for token, (start, end) in places if token == unknown)
    return next((word for word in words if word != name), None)


def _check_config(path: str | Path) -> None:
    """Reject a folder whose config.json would make transformers compute or allocate without bounds."""
    if (Path(path) / "config.json").exists():
        read_model_config(path)


def without_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: the trainer must compute the same log-probabilities as the generator."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # Llama's attention_dropout, OPT's dropout and layerdrop
            if "drop" in name and isinstance(value, float):
                vars(module)[name] = 0.0


def checkpoint_activations(model: Any) -> None:
    """Keep only the inputs of every block and recompute its activations in the backward pass."""
    # renamed in transformers 5.2x
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.enable_input_require_grads()  # frozen embeddings would cut the graph


def hidden_states(model: nn.Module, cache: Any = None, **inputs: Any) -> Tensor:
    """Return the last hidden states, before the LM head, (B, T, D); `cache` is the KV cache."""
    if cache is not None:
        inputs |= {cache_argument(): cache, "use_cache": True}
    return model.base_model(**inputs).last_hidden_state  # pyright: ignore[reportCallIssue]


@functools.cache
def cache_argument() -> str:
    """Return the name of the argument that takes the KV cache; transformers 5.24 renamed it."""
    import transformers
    from packaging.version import Version

    return "cache" if Version(transformers.__version__) >= Version("5.24.0") else "past_key_values"


@torch.no_grad()
def log_probs_TV(
    model: nn.Module,
    hidden_TD: Tensor,
    temperature: float,
    fp32_logits: bool,
    head: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:
    """Return log-probabilities over the vocabulary at the sampling temperature, in FP32.

    With `fp32_logits` the LM head itself is computed in FP32 (MiniMax-M1, arXiv 2506.13585; ScaleRL,
    arXiv 2510.13786); without it the head keeps the model's precision, and only the softmax is FP32.
    With a gradient, use `scalerl.rl.learner.score.chunked_log_probs`. `head` is the result of `head_of` for
    these weights, if the caller keeps it.
    """
    weight_VD, bias_V = head or head_of(model, fp32_logits)
    logits_TV = logits_of(hidden_TD.to(weight_VD.dtype), weight_VD, bias_V, fp32_logits)
    return torch.log_softmax(logits_TV.div_(temperature), dim=-1)


def cut_TV(logp_TV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Return the log-probabilities that remain after top-k and then top-p, as in vLLM and transformers.

    They are -inf outside the `top_k` likeliest (0: all), then outside the fewest that sum to `top_p`."""
    if top_k:
        least_T1 = logp_TV.topk(min(top_k, logp_TV.shape[-1])).values[:, -1:]
        logp_TV = logp_TV.masked_fill(logp_TV < least_T1, -torch.inf).log_softmax(-1)
    if top_p < 1:
        likeliest_TV, order_TV = logp_TV.sort(descending=True)
        p_TV = likeliest_TV.double().exp()  # in float32 the sum over a large vocabulary is off by 1e-6
        likeliest_TV = likeliest_TV.masked_fill(p_TV.cumsum(-1) - p_TV >= top_p, -torch.inf)
        logp_TV = likeliest_TV.gather(-1, order_TV.argsort(-1)).log_softmax(-1)
    return logp_TV


def head_of(model: nn.Module, fp32: bool) -> tuple[Tensor, Tensor | None]:
    """Return weight (V, D) and bias (V,) of the LM head for `logits_of`.

    They are in the model's precision, or FP32 copies if `fp32` on a CPU, which has no bfloat16 product with
    float32 sums.
    """
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    weight_VD, bias_V = head.weight, head.bias
    if not fp32 or weight_VD.is_cuda:
        return weight_VD, bias_V
    kind = torch.promote_types(weight_VD.dtype, torch.float32)
    return weight_VD.to(kind), None if bias_V is None else bias_V.to(kind)


def logits_of(hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, fp32: bool) -> Tensor:
    """Return the logits in float32, from hidden states in the precision of the head of `head_of`.

    With `fp32` products are summed in float32; without it logits are rounded to the weights' precision.
    """
    if fp32 and weight_VD.dtype.itemsize < 4:
        logits_TV = _float32_product(hidden_TD, weight_VD.t())
        return logits_TV if bias_V is None else logits_TV + bias_V.float()
    logits_TV = nn.functional.linear(hidden_TD, weight_VD, bias_V)
    return logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` with float32 sums; `a` may be in float32 if `b` is in bfloat16.

    In that case `a` is split into a sum of two bfloat16 tensors, with a relative error of 2^-16. So `b` needs
    no float32 copy, and tensor cores compute both products.
    """
    if b.dtype.itemsize >= 4:
        return a @ b
    if a.dtype == b.dtype:
        return _float32_product(a, b)
    high = a.to(b.dtype)
    return _float32_product(high, b).add_(_float32_product((a - high).to(b.dtype), b))


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of bfloat16 matrices in float32, in which each product of two elements is exact."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of a causal LM, counted from its shape.

    A forward pass costs 2 per token and weight of a matrix product, and 4 D L per token and position that it
    attends to (L layers); a backward pass costs twice as much. Embedding look-ups are free; the head counts.
    """

    matrix_weights: int
    attention_per_position: int

    @classmethod
    def of(cls, model: nn.Module) -> FlopCount:
        """Count the matrix weights that a token is multiplied with; a tied head counts once."""
        config: Any = model.config
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        matrices = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in embeddings]
        # Experts are stacked in one tensor, and a token uses `num_experts_per_tok` of them.
        active = getattr(config, "num_experts_per_tok", 0)
        seen = {id(p): p.numel() * active // len(p) if p.ndim == 3 else p.numel() for p in matrices}
        head = model.get_output_embeddings().weight  # pyright: ignore[reportCallIssue]
        seen[id(head)] = head.numel()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_attention_heads * head_dim
        return cls(sum(seen.values()), 4 * config.num_hidden_layers * width)

    def forward(self, tokens: float, positions: float) -> float:
        """Return the cost of `tokens` tokens that attend to `positions` positions in total."""
        return 2.0 * self.matrix_weights * tokens + self.attention_per_position * positions


def model_of(recipe: Recipe, model_folder: str | Path) -> nn.Module:
    """Load the model in the recipe's precision onto the compute device."""
    return load_model(model_folder, dtype_of(recipe.precision)).to(compute_device())
