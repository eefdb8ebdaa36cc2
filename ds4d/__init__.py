"""ds4d: train any Hugging Face causal language model in any layout, from one JSON file."""

__version__ = "0.1.0"
