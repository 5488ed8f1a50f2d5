"""Reading prompts and cutting them into shards."""
