"""What commands share: their arguments, amounts of compute, data, and printed text.

The commands in `scalerl.cli` import it.
"""
