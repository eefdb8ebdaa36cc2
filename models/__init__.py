"""Blueprints: what an architecture of Hugging Face is made of, as data. None is needed yet: data
parallelism takes every causal language model as it is."""
