"""What a cluster would do with a recipe, before it is rented: a simulation of the training loop."""
