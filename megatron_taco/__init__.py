"""megatron_taco makes Megatron-LM train over slow links by compressing what its ranks exchange.

Importing the package changes nothing and needs neither torch nor megatron-core.
"""

__version__ = "0.1.0"
