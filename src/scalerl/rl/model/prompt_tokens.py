"""From a prompt to its tokens: the one place, for what checks prompts and for what samples from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalerl.errors import InputError
from scalerl.rl.types import Prompt


def prompt_tokens(tokenizer: Any, prompt: Prompt) -> np.ndarray:
    """The tokens of a prompt, shape (T,): its conversation by the chat template, or else its text as it is.

    Nothing is added to a text; a conversation ends where the assistant's turn begins.

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
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise InputError(f"the chat template refuses prompt {prompt.id} ({error})") from error
    return np.array(ids, dtype=np.int64)
