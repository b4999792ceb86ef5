"""How to split sampling compute between prompts per batch, completions per prompt and steps.

    allocation.py   the best split at every budget; table.py shows it
    hull.py, mixed.py     places within measured points; linear models whose coefficients shrink together

It may import `scalerl.curve`.
"""
