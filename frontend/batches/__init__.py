"""The Batches API: its routes, and the process that carries batches on."""
