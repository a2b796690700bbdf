"""Which default a table should get: methods, clipping bounds, step sizes, batches, lengths and networks on ten tables."""
