"""Studies: recipes x seeds, run, and compared so that ceiling, efficiency and noise are told apart."""
