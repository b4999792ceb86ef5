"""Imports of torch and transformers for the process that workers are forked from; not for use elsewhere.

This module must start no thread and must not initialise CUDA, because neither survives a fork.
"""

import gc
from contextlib import suppress

with suppress(Exception):  # a worker raises it again and reports it
    import transformers.models.auto.tokenization_auto
    import transformers.models.llama.modeling_llama  # loads modules that all models share
    import transformers.utils.logging

    # A tqdm bar takes a semaphore; a killed worker leaks it, and Python warns about that at its exit.
    transformers.utils.logging.disable_progress_bar()
gc.collect()
gc.freeze()  # otherwise garbage collection in a worker would copy shared pages
