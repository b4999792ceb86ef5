"""A run on a cluster: Ray places and supervises its parts; `settings` is what a recipe may say of that."""
