"""Triton kernels for the compressors, which are their oracles: same bytes, one read, one write.

Importing this package imports neither Triton nor torch; ``megatron_taco.compressors.dispatch``
imports ``launch`` when the first tensor arrives that a kernel can take.
"""
