"""Loaded by the process that workers are forked from: torch and transformers. Import it nowhere else.

No thread may start here, and CUDA must not be initialised.
"""

import gc
from contextlib import suppress

with suppress(Exception):  # a worker raises it again, where it is reported
    import transformers.models.auto.tokenization_auto
    import transformers.models.llama.modeling_llama  # loads what all models have in common
    import transformers.utils.logging

    # A bar of tqdm takes a semaphore, which a worker that is killed leaves, and Python warns of at its exit.
    transformers.utils.logging.disable_progress_bar()
gc.collect()
gc.freeze()  # a collection in a worker would copy the pages that all share
