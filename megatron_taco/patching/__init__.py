"""Replacements inside Megatron: counted, checked before the first change, undone exactly."""
