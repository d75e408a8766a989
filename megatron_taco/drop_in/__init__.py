"""Compression in a training script that is not ours: started by ``launch``, or by ``install``."""
