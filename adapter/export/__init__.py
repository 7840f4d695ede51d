"""Versions written as other engines read language models: a Hugging Face checkpoint, a GGUF file."""
