"""Per-example gradients and their clipped sums: the code that sees individual examples."""
