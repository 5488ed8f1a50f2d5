"""The model: where it comes from, how it is obtained and proven, and its copy on the RAM disk."""
