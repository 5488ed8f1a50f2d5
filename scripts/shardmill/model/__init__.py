"""Getting the model, and staging it on the RAM disk."""
