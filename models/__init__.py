"""Blueprints: what an architecture of Hugging Face is made of, as data.

``derive.py`` reads transformers' own plans; a file here says what these leave out, for one family.
"""
