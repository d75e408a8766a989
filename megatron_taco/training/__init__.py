"""The trainer: Megatron's own loop with our configuration, model and data providers."""
