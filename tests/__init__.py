"""Tests of megatron_taco."""
