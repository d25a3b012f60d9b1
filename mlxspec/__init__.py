"Exact speculative decoding for MLX: the same text, only faster, measured."
__version__ = '0.1.0'
