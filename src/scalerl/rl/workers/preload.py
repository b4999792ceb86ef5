"""Loaded by the process that workers are forked from: torch and transformers. Import it nowhere else.

Nothing is called: no thread may start here, and CUDA must not be initialised.
"""

import gc
from contextlib import suppress

with suppress(Exception):  # a worker raises it again, where it is reported
    import transformers.models.auto.tokenization_auto
    import transformers.models.llama.modeling_llama  # noqa: F401 - loads what all models have in common
gc.collect()
gc.freeze()  # a collection in a worker would copy the pages that all share
