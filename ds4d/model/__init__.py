"""The Hugging Face model: its config, made on meta, its tensors drawn or read one at a time."""
