"""Tests on several gloo ranks, through the run_ranks fixture."""
