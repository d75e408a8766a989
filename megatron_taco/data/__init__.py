"""Text to Megatron's ``.bin`` / ``.idx``: readers, tokenisers, writer, the embedded source.

Importing this package needs numpy alone; Megatron and transformers are imported inside the
functions that write and that load a Hugging Face tokeniser.
"""

from megatron_taco.data.errors import DataError
from megatron_taco.data.tokenizers import ByteTokenizer, HfTokenizer, Tokenizer, load_tokenizer

__all__ = ["ByteTokenizer", "DataError", "HfTokenizer", "Tokenizer", "load_tokenizer"]
